"""Saves in the background: their host memory is made once, and the update waits for their copies, the host does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.checkpoint import saver
from runtime.checkpoint.saver import InOrder, Staging
from runtime.engine.engine import Engine
from tests.runtime.checkpoint.test_saved_states import engine_of, ids
from tests.tools.limits import HANG_SECONDS
from tests.tools.resumed import same_state, state_of

aten = torch.ops.aten


class NewBytes(TorchDispatchMode):
    """Of all memory that ops make: results that lie in none of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        found = {x.untyped_storage()._cdata: x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)}
        self.num_bytes += sum(storage.nbytes() for key, storage in found.items() if key not in given)
        return result


class Later(InOrder):
    """A queue beside the steps: copies run when somebody waits for them, and read the values of that moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: list[Callable[[], Any]] = []

    def copying(self) -> AbstractContextManager[object]:
        return _Queued(self._queued)

    def hold(self) -> None:
        self.wait()

    def wait(self) -> None:
        with self._lock:
            while self._queued:
                self._queued.pop(0)()


class _Queued(TorchDispatchMode):
    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


@contextmanager
def saving_with(engine: Engine, staging: Staging) -> Iterator[None]:
    engine.saver.staging = staging
    engine.optimizer.before_overwriting = staging.hold
    yield
    engine.close()


def test_a_second_save_in_the_background_makes_no_memory(tmp_path: Path) -> None:
    engine, made = engine_of(0), []
    engine.train_step(ids())
    for number in range(2):
        engine.train_step(ids(number))
        with NewBytes() as new:
            engine.save(tmp_path, wait=False)
        made.append(new.num_bytes)
        engine.wait_saves()
    assert made[0] >= engine.saver.staging.num_bytes > 0
    assert made[1] == 0
    engine.close()


def test_an_update_comes_behind_the_copies_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other, queue = engine_of(0), engine_of(0), Later()
    may_write, wait = threading.Event(), queue.wait

    def wait_later() -> None:
        if threading.current_thread().name == "meshwright-save":
            assert may_write.wait(HANG_SECONDS)
        wait()

    monkeypatch.setattr(queue, "wait", wait_later)
    with saving_with(engine, Staging(queue)):
        engine.train_step(ids())
        wanted = state_of(engine)
        engine.save(tmp_path, wait=False)
        assert queue._queued, "the host has waited for the copies"
        loss = engine.forward_backward(ids(1))
        assert loss == loss
        assert queue._queued, "a forward and its backward overwrite nothing"
        engine.optimizer_step()
        assert not queue._queued
        may_write.set()
        engine.wait_saves()
    other.load(tmp_path)
    assert same_state(state_of(other), wanted)


def test_tensors_keep_their_values_shapes_and_dtypes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "BLOCK_BYTES", 256)
    given = [torch.randn(7), torch.arange(6).view(2, 3), torch.tensor(True), torch.randn(50, dtype=torch.float64)]
    given += [torch.randn(4, 6, dtype=torch.bfloat16).t(), torch.empty(0)]
    made = Staging(InOrder())

    def same(found: list[Tensor]) -> bool:
        return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, given, strict=True))

    first = made.take(given)
    assert same(first)
    num_bytes = made.num_bytes
    again = made.take(given)
    assert same(again)
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]
    made.take(given[:2])
    assert made.num_bytes == num_bytes <= 1024
    assert len({x.data_ptr() for x in first[:-1]}) == len(given) - 1
