"""The laboratory of the session: models are captured once, ranks are forks."""

from __future__ import annotations

import pytest

from tests.tools.laboratory import Lab, session_lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return session_lab()
