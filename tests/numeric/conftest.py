"""One laboratory for the session: models are captured once, ranks are forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.numeric.server import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    laboratory = Lab()
    yield laboratory
    laboratory.close()
