"""What a save holds beside weights, in one process: the loss scale, counts of updates, a first step, frozen models."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright import __version__
from planner import PlanError
from planner.mesh import Mesh
from planner.sharding.boxes import Box
from runtime.checkpoint import saver
from runtime.checkpoint.conversion import export
from runtime.checkpoint.manifest import OptimizerEntry
from runtime.checkpoint.pieces import WrittenPiece
from runtime.checkpoint.safetensors_files import SINGLE
from runtime.checkpoint.saver import InOrder, Staging, write_save
from runtime.checkpoint.saves import resolve, saves_in, verify
from runtime.distributed.groups import Groups
from runtime.engine.engine import Engine
from tests.tools.checkpoints import Own, own_engine
from tests.tools.limits import HANG_SECONDS
from tests.tools.resumed import same_state, state_of
from tests.tools.small_saves import content

MEANS = {"row_var": (5, 1), "col_var": (1, 4)}
FLOAT16 = {"precision": {"parameters": "float16", "loss_scale": "dynamic"}}


def ids(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(10, (2, 3), generator=torch.Generator().manual_seed(seed))}


def engine_of(seed: int, **sections: Any) -> Engine:
    torch.manual_seed(seed)
    model = Own()
    model.unused.requires_grad_(False)
    return own_engine(model, **sections)


def test_a_save_before_the_first_step_holds_no_moments_and_loads_over_some(tmp_path: Path) -> None:
    first, second = engine_of(0), engine_of(1)
    first.save(tmp_path)
    assert verify(resolve(tmp_path)).optimizer.updates == 0
    assert verify(resolve(tmp_path)).meshwright == __version__
    assert set(verify(resolve(tmp_path)).tensors["up.weight"].values) == {"parameter"}
    for seed in range(3):
        second.train_step(ids(seed))
    assert second.load(tmp_path) == {}
    assert second.step_index == 0
    losses = [[engine.train_step(ids(seed)).loss for seed in range(3)] for engine in (first, second)]
    assert losses[0] == losses[1]
    assert same_state(state_of(first), state_of(second))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 1)], ids=["every step was skipped", "the third was skipped"])
def test_the_loss_scale_and_the_count_of_updates_come_back(tmp_path: Path, before: int, after: int) -> None:
    first, second = engine_of(0, **FLOAT16), engine_of(1, **FLOAT16)
    train(first, 2.0**10, before, skipped=False)
    train(first, 2.0**40, 1, skipped=True)
    train(first, 2.0**12, after, skipped=False)
    first.save(tmp_path)
    assert verify(resolve(tmp_path)).optimizer.updates == before + after
    second.load(tmp_path)
    assert second.loss_scale.value == first.loss_scale.value == (2.0**12 if after else 2.0**39)
    assert int(second.loss_scale.num_good) == after
    assert second.step_index == before + 1 + after
    for engine in (first, second):
        train(engine, 2.0**10, 1, skipped=False)
    assert same_state(state_of(first), state_of(second))


def train(engine: Engine, scale: float, count: int, *, skipped: bool) -> None:
    assert engine.loss_scale.tensor is not None
    for _ in range(count):
        engine.loss_scale.tensor.fill_(scale)
        assert engine.train_step(ids(engine.step_index)).skipped == skipped


def test_what_was_trained_and_is_frozen_now_is_refused_by_name(tmp_path: Path) -> None:
    first = engine_of(0)
    first.train_step(ids())
    first.save(tmp_path)
    model = Own()
    model.unused.requires_grad_(False)
    model.up.bias.requires_grad_(False)
    with pytest.raises(PlanError, match=r"up\.bias was saved with parameter, exp_avg, exp_avg_sq, and resuming needs"):
        own_engine(model).load(tmp_path)


def test_a_save_of_another_optimizer_says_how_to_begin_anew(tmp_path: Path) -> None:
    first = engine_of(0, optimizer={"name": "sgd"})
    first.train_step(ids())
    first.save(tmp_path)
    with pytest.raises(PlanError, match="the save is of the optimizer sgd") as caught:
        engine_of(1).load(tmp_path)
    assert "adamw, muon or a class of torch.optim: meshwright checkpoint DIR --export HF_DIR" in str(caught.value)


def test_weights_of_a_save_with_means_of_rows_and_columns_can_be_exported(tmp_path: Path) -> None:
    """Adafactor wrote such saves."""
    given = content(1, 2.0)
    means = [WrittenPiece(f"up.{kind}", kind, Box((0, 0), shape), torch.ones(shape)) for kind, shape in MEANS.items()]
    pieces = [piece for piece in given.pieces if piece.kind == "parameter"]
    names = {"up": (), **{piece.name: () for piece in means}, "bias": ()}
    by_adafactor = given.manifest.model_copy(update={"optimizer": OptimizerEntry(name="adafactor", updates=1)})
    old = replace(given, pieces=[*pieces, *means], names=names, manifest=by_adafactor)
    write_save(Groups(Mesh(), 0, torch.device("cpu"), timedelta(seconds=HANG_SECONDS)), tmp_path / "run", old)
    save = resolve(tmp_path / "run")
    export(save, verify(save), tmp_path / "weights")
    assert load_file(tmp_path / "weights" / SINGLE).keys() == {"up", "bias"}


def test_a_later_save_of_the_same_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.train_step(ids())
    engine.save(tmp_path, extra={"n": 1})
    engine.save(tmp_path, wait=False, extra={"n": 2})
    engine.wait_saves()
    assert engine.load(tmp_path) == {"n": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    engine.close()


def test_steps_after_a_save_in_the_background_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = engine_of(0), engine_of(0)
    for each in (engine, other):
        each.train_step(ids())
    wanted, may_write, write = state_of(engine), threading.Event(), saver.write_pieces

    def write_later(*args: Any) -> Any:
        assert may_write.wait(HANG_SECONDS)
        return write(*args)

    monkeypatch.setattr(saver, "write_pieces", write_later)
    engine.save(tmp_path, wait=False)
    engine.train_step(ids(1))
    assert saves_in(tmp_path) == []
    may_write.set()
    engine.wait_saves()
    other.load(tmp_path)
    assert same_state(state_of(other), wanted)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen, sync, rename = engine_of(0), [], os.fsync, Path.rename
    replace = Path.replace

    def synced(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        seen.append("sync " + re.sub(r"[.](step|latest).*partial", r"new \1", path))
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        seen.append(f"name {target}")
        return rename(path, target)

    def replaced(path: Path, target: Path) -> Path:
        seen.append(f"name {target}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    run = tmp_path / "run"
    engine.save(run)
    order = [
        f"sync {run}/new step/rank-00000.safetensors",
        f"sync {run}/new step/manifest.json",
        f"sync {run}/new step",
        f"name {run}/step-00000000",
        f"sync {run}",
        f"sync {run}/new latest",
        f"name {run}/latest",
        f"sync {run}",
    ]
    assert [event for event in seen if event in order] == order


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
