"""What ranks run to save and to resume; each job returns what a test compares, from every rank."""

import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner import PlanError
from planner.sharding.boxes import Box
from runtime import Engine
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.pieces import PieceReader
from runtime.checkpoint.saves import resolve, verify
from tests.tools.limits import HANG_SECONDS

Batches = list[dict[str, Tensor]]
BEFORE, AFTER = 3, 5


def steps(engine: Engine, batches: Batches, count: int) -> list[float]:
    """Losses of the next steps; the batch of a step is always the same."""
    return [engine.train_step(batches[engine.step_index % len(batches)]).loss for _ in range(count)]


def train_and_save(plan: Any, batches: Batches, directory: Path, wait: bool = True) -> dict[str, Any]:
    """BEFORE steps, a save, and AFTER steps of the unbroken run."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        steps(engine, batches, BEFORE)
        parameters = engine.gather_parameters()
        engine.save(directory, wait, extra={"position": [BEFORE, "epoch"]})
        return {"parameters": parameters, "losses": steps(engine, batches, AFTER)}


def resume(plan: Any, batches: Batches, directory: Path, again: Path | None = None) -> dict[str, Any]:
    """Load, save at once to ``again``, and go on."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        extra = engine.load(directory)
        parameters = engine.gather_parameters()
        if again is not None:
            engine.save(again, extra=extra)
        step = engine.step_index
        return {"parameters": parameters, "losses": steps(engine, batches, AFTER), "extra": extra, "step": step}


def stored(directory: Path) -> dict[tuple[str, str], Tensor]:
    """(name, kind) → the whole tensor, of the last save."""
    save = resolve(directory)
    manifest: Manifest = verify(save)
    found = {}
    with PieceReader(save, manifest) as reader:
        for name, entry in manifest.tensors.items():
            for kind, dtype in entry.values.items():
                whole = torch.empty(entry.shape, dtype=getattr(torch, dtype))
                reader.read_into(whole, name, kind, Box(tuple(0 for _ in entry.shape), entry.shape))
                found[name, kind] = whole
    return found


def save_twice(plan: Any, batches: Batches, directory: Path) -> None:
    """Two saves in one directory, of BEFORE steps and of one more."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        steps(engine, batches, BEFORE)
        engine.save(directory, wait=False)
        steps(engine, batches, 1)
        engine.save(directory)


def state_of(engine: Engine) -> dict[str, Any]:
    """All of one process that a load changes, copied."""
    optimizer = engine.optimizer
    tensors = [tensor for buffer in optimizer.buffers.buffers for tensor in buffer.kept_parameters]
    tensors += [shard.main for shard in optimizer.shards]
    states = [optimizer.optimizer.state[shard.main] for shard in optimizer.shards]
    tensors += [state[kind] for state in states for kind in sorted(state)]
    return {"tensors": [tensor.clone() for tensor in tensors], "step": engine.step_index}


def same_state(first: dict[str, Any], second: dict[str, Any]) -> bool:
    pairs = zip(first["tensors"], second["tensors"], strict=True)
    return first["step"] == second["step"] and all(torch.equal(a, b) for a, b in pairs)


def save_on_a_full_disk(plan: Any, batches: Batches, directory: Path, rank: int, wait: bool) -> dict[str, Any]:
    """A save, then one for which ``rank`` finds no room, a step, and one for which it does again."""
    found: dict[str, Any] = {}
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        steps(engine, batches, 1)
        engine.save(directory)
        steps(engine, batches, 1)
        if engine.groups.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
        try:
            engine.save(directory, wait)
            engine.train_step(batches[0])
            engine.wait_saves()
        except PlanError as error:
            found["error"] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found["left"] = sorted(path.name for path in directory.iterdir())
        steps(engine, batches, 1)
        engine.save(directory, wait=False)
        found["step"] = engine.step_index
    return found


def fail_in_the_background_at_the_end(plan: Any, batches: Batches, directory: Path) -> tuple[str, bool]:
    """The error of a save that nobody waited for, as the end of the engine raises it."""
    try:
        with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
            steps(engine, batches, 1)
            if engine.groups.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
            engine.save(directory, wait=False)
    except PlanError as error:
        return error.what, engine.groups.world is None
    return "", True


def tied_copies(plan: Any, batches: Batches, directory: Path) -> list[tuple[bytes, int]]:
    """The bytes of this rank's part of the tied weight: after steps, and after a resume and more steps."""
    found = []
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        for resumes in (False, True):
            if resumes:
                engine.load(directory)
            steps(engine, batches, 4)
            engine.optimizer.wait_parameters()
            engine.save(directory)
            (name,) = (row.name for row in engine.plan.parameters if len(row.stages) > 1)
            held = [stage.parameter(name) for stage in engine.program.stages if name in stage.attributes]
            found += [(part.detach().numpy().tobytes(), engine.groups.place["tp"]) for part in held]
    return found


def load_what_does_not_fit(plan: Any, batches: Batches, directory: Path) -> tuple[str, bool]:
    """The error of loading another model's save, and whether all is as before."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        steps(engine, batches, 1)
        before = engine.gather_parameters()
        try:
            engine.load(directory)
            told = ""
        except PlanError as error:
            told = str(error)
        after = engine.gather_parameters()
        return told, all(torch.equal(before[name], after[name]) for name in before) and engine.step_index == 1


def files_that_each_rank_reads(plan: Any, batches: Batches, directory: Path) -> list[str]:
    """Of a save of the same layout."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        engine.save(directory)
        found = sorted(engine.saves.training_state().needed(verify(resolve(directory))))
        engine.load(directory)
    return found


def die_in_a_save(plan: Any, batches: Batches, directory: Path, wait: bool) -> None:
    """A good save; then rank 1 ends, as by kill -9, before its file of the next one is on the disk."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        steps(engine, batches, 1)
        engine.save(directory)
        steps(engine, batches, 1)
        if engine.groups.rank == 1:
            os.fsync = lambda _: os._exit(9)
        engine.save(directory, wait)
        engine.wait_saves()
