"""Pages that were freed below what still lives go back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from planner.capture.model.meta_init import give_back_freed

PIECE, COUNT = 100_000, 1_000  # bytes: too small for glibc to ask the system for each


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_gaps_between_what_still_lives_go_back():
    pieces: list[bytes | None] = [b"x" * PIECE for _ in range(COUNT)]
    pieces[:-1] = [None] * (COUNT - 1)
    before = resident()
    give_back_freed()
    assert before - resident() > PIECE * COUNT // 2
    assert pieces[-1]


def test_a_library_without_the_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_freed()
