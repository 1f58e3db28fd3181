"""A tensor that another thread holds a moment longer than its op runs is no activation, and one that stays is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from examples.gpt import GPT
from planner import plan
from planner.spec.spec import Spec
from runtime.engine import Engine
from runtime.memory.run import held_tensors
from runtime.memory.watch import MemoryWatch
from runtime.verify.batches import random_batch

SPEC = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 32}, "targets": {"like": "input_ids"}},
}
EXTRA = 1 << 20


def kept(seconds: float) -> list[int]:
    """Bytes at each action of a step, where a thread holds ``EXTRA`` bytes of each forward for ``seconds``."""
    spec = Spec.load(SPEC)
    decided = plan(GPT(vocabulary=32, length=8, width=8, num_layers=1, num_heads=2), spec)
    batch = random_batch(spec, decided, 0)
    threads: list[threading.Thread] = []
    with Engine(decided) as engine:
        watch = MemoryWatch(engine.executor, held_tensors(engine))

        @contextmanager
        def around(action: Any, step: Any) -> Iterator[None]:
            with watch.around(action, step):
                yield
                made = [torch.zeros(EXTRA, dtype=torch.uint8)] if seconds else []
                threads.append(threading.Thread(target=hold, args=(made, seconds)))
                threads[-1].start()

        engine.executor.around = around
        engine.train_step(batch)
    for thread in threads:
        thread.join()
    return [moment.kept for moment in watch.moments]


def hold(made: list[torch.Tensor], seconds: float) -> None:
    time.sleep(seconds)
    made.clear()


def test_a_tensor_that_a_thread_holds_a_moment_longer_is_not_kept() -> None:
    assert kept(0.005) == kept(0.0)


def test_a_tensor_that_a_thread_goes_on_holding_is_kept() -> None:
    assert max(kept(2.0)) >= max(kept(0.0)) + EXTRA
