"""One thread a process, no downloads, tiers of tests, and no GPU test where there is no GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

if TYPE_CHECKING:
    from tests.tools.laboratory import Lab

pytest_plugins = ["tests.tools.tiers"]
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Modules of libraries live to the end, and graphs that are planned make much and leave little: looking for garbage
    as often as Python does takes a fifth of all tests' time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def lab() -> Lab:
    """One laboratory for the session: models are captured once, ranks are forks."""
    from tests.tools.laboratory import session_lab

    return session_lab()


@pytest.fixture(autouse=True)
def _collector_stays_on() -> Iterator[None]:
    """A test that leaves the garbage collector off, or a plan under way in a thread, would fail others."""
    from planner import pause_gc

    yield
    was_on, planning = gc.isenabled(), dict(pause_gc._planning)
    gc.enable()
    assert (was_on, planning) == (True, {}), f"the garbage collector: {was_on}; threads that plan: {planning}"
