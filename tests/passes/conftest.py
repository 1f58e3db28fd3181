"""The numeric tests' laboratory, for the tests here that run lowered graphs on ranks."""

from __future__ import annotations

import pytest

from tests.tools.laboratory import Lab, session_lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return session_lab()
