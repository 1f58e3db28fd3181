"""A tensor that another thread holds a moment longer than its op runs is no activation, and one that stays is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.gpt import GPT
from planner import plan
from planner.spec.spec import Spec
from runtime.engine.engine import Engine
from runtime.profiling.memory import MemoryWatch, held_tensors
from runtime.verify.batches import random_batch
from tests.tools.limits import HANG_SECONDS

SPEC = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 32}, "targets": {"like": "input_ids"}},
}
EXTRA = 1 << 20


def kept(patch: pytest.MonkeyPatch, until: str = "") -> list[int]:
    """Bytes at each action of a step. A thread holds ``EXTRA`` bytes of each forward ``until`` the watch has "waited"
    for it, or the step's "end"."""
    spec = Spec.load(SPEC)
    decided = plan(GPT(vocabulary=32, length=8, width=8, num_layers=1, num_heads=2), spec)
    batch = random_batch(spec, decided, 0)
    threads: list[threading.Thread] = []
    let_go = threading.Event()

    def wait(_: float) -> None:
        if until == "waited":
            let_go.set()
            for thread in threads:
                thread.join(HANG_SECONDS)

    patch.setattr("runtime.profiling.memory.time", SimpleNamespace(sleep=wait))
    with Engine(decided) as engine:
        watch = MemoryWatch(engine.executor, held_tensors(engine))

        @contextmanager
        def around(action: Any, step: Any) -> Iterator[None]:
            with watch.around(action, step):
                yield
                let_go.clear()
                made = [torch.zeros(EXTRA, dtype=torch.uint8)] if until else []
                threads.append(threading.Thread(target=hold, args=(made, let_go)))
                threads[-1].start()

        engine.executor.around = around
        engine.train_step(batch)
    let_go.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return [moment.kept for moment in watch.moments]


def hold(made: list[torch.Tensor], let_go: threading.Event) -> None:
    let_go.wait(HANG_SECONDS)
    made.clear()


@pytest.mark.thorough
def test_a_tensor_that_a_thread_holds_a_moment_longer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, until="waited") == kept(monkeypatch)


@pytest.mark.thorough
def test_a_tensor_that_a_thread_goes_on_holding_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(kept(monkeypatch, until="end")) >= max(kept(monkeypatch)) + EXTRA
