"""Tokens by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.data.tokens import Tokens
from tests.tools.hand_tokens import by_hand


@pytest.fixture
def make_tokens() -> Callable[..., Tokens]:
    return by_hand
