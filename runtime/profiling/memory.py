"""The command `memory`: start the plan's ranks, run a step, and compare measured with planned memory.

parameters, gradients, optimizer    the allocated buffers              within 1 %
whole                               full weights and gradients at one time, if
                                    ranks keep shards of them          within 3 %
activations                         with logits: tensors that autograd saves for all microbatches in flight,
                                    at the planned peak                within 3 %
at the peak                         with working memory and messages: all live memory at the step's peak; reported
                                    without a bound, as the backend decides when to free a message

For a rank that only evaluates, compared with ``Plan.evaluation_memory``:

parameters      all tensors that the engine holds between calls     within 1 %
whole           full weights at one time, if ranks keep shards      within 3 %
activations     with messages: all live memory at the peak of the
                forwards that evaluate and score a batch            within 3 %
keys and values that ``generate`` caches, if it can cache them      within 1 %

Memory of a rank during the actions of a step, by its live tensors:

    live    all memory that a forward, a backward or a message has allocated and not freed
    kept    the part that remains between two actions, except messages in flight

Tensors are counted by storage, so that views count once. Weights, buffers, batches and gradients exist before and are
not counted. Workspaces inside kernels, and temporaries of compiled pieces, are not visible.
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from passes.errors import PlanError
from planner.capture.model.reference import load_to_plan, pretrained_directory
from planner.cost.memory import MemoryRow
from planner.frozen_plan import Plan
from planner.lower import kept_bytes
from planner.pipeline.schedule import Action
from planner.spec.spec import Spec
from planner.trace.observe import Allocations
from runtime.compiled.requirements import check_machine
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.pipeline.executor import Executor, Step
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport, predicted_by_action
from runtime.shared_plan import Planned, planned, shared
from runtime.verify.batches import random_batch

TIMEOUT_SECONDS = 1800.0
KEPT = "keys and values"
ALLOWED = {"parameters": 0.01, "gradients": 0.01, "optimizer": 0.01, "activations": 0.03, "whole": 0.03, KEPT: 0.01}
SETTLING_SECONDS = (0.005, 0.02)


class OfRank(NamedTuple):
    """The memory of one rank: by category, and by action of its schedule."""

    rows: list[Compared]
    actions: list[ActionMemory]


def compare_memory(
    model_ref: str, spec_path: str, *, evaluates: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> MemoryReport:
    """Start the plan's ranks as local processes, and compare the memory of one step with the plan.

    ``evaluates``: an evaluation instead, by engines that hold nothing for training.
    Raises PlanError for bad input, RankError when a rank fails.
    """
    spec = Spec.load(spec_path)
    check_machine(spec)
    own = planned(load_to_plan(model_ref, spec.seed), spec)
    rows = own.plan.evaluation_memory() if evaluates else own.plan.memory
    peaks = ", ".join(f"pp rank {row.pp_rank} {row.peak}" for row in rows)
    world_size, arguments = own.plan.mesh.world_size, (model_ref, spec_path, evaluates)
    if world_size == 1:
        of_ranks = [memory_of_rank(*arguments, own=own)]
    else:
        with shared(own.plan) as file:
            del own  # and its model: each rank builds its own
            of_ranks = launch(memory_of_rank, world_size, *arguments, file, timeout_seconds=timeout_seconds)
    compared = tuple(row for rank in of_ranks for row in rank.rows)
    return MemoryReport(compared, (f"peak: {peaks}",), tuple(action for rank in of_ranks for action in rank.actions))


def memory_of_rank(
    model_ref: str, spec_path: str, evaluates: bool = False, file: str | None = None, own: Planned | None = None
) -> OfRank:
    """Measure on this rank's device. ``own``: the plan, if this process made it; ``file``: the launcher's plan."""
    spec = Spec.load(spec_path)
    own = own or planned(load_to_plan(model_ref, spec.seed), spec, file)
    own.model, decided, weights = None, own.plan, pretrained_directory(model_ref)
    if evaluates:
        return OfRank(measured_evaluation(decided, random_batch(spec, decided, 0), weights), [])
    return measured(decided, [random_batch(spec, decided, seed) for seed in range(2)], weights)


def measured(decided: Plan, batches: Sequence[dict[str, Tensor]], weights: Path | None = None) -> OfRank:
    """Return the memory of this rank in the second step, as libraries allocate permanent state in the first.

    ``weights``: a directory that the engine loads first.
    """
    rank = int(os.environ.get("RANK", "0"))
    with Engine(decided) as engine:
        if weights is not None:
            engine.load_pretrained(weights)
        engine.train_step(batches[0])
        outside = held_tensors(engine)
        watch = MemoryWatch(engine.executor, outside)
        engine.executor.around = watch.around
        engine.train_step(batches[1])
        row = decided.memory[engine.mesh.pp_rank]
        order = decided.schedule.orders[row.pp_rank]
        moments = watch.moments[-len(order) :]  # without the forwards of an audit before the step
        buffers = engine.optimizer.measured_bytes()
        sizes = {
            "parameters": buffers["parameters"] + registered_bytes(engine),
            "gradients": buffers["gradients"],
            "optimizer": buffers["optimizer"] + buffers["main_parameters"] + buffers["main_gradients"],
        }
        rows = [Compared(rank, name, getattr(row, name), size, ALLOWED[name]) for name, size in sizes.items()]
        there = next(moment for moment in moments if moment.action == row.peak)
        saved, live = row.activations + row.logits, max(moment.live for moment in moments)
        rows.append(Compared(rank, "activations", saved, there.kept, ALLOWED["activations"]))
        rows.append(Compared(rank, "at the peak", saved + row.working + row.communication, live))
        held = engine.optimizer.buffers
        rows += _whole(rank, row, held.weights.most_bytes + held.scattered.most_bytes)
        kept = predicted_by_action(row.of_microbatch, order)
        actions = [ActionMemory(rank, row.pp_rank, m.action, kept.get(m.action), m.kept, m.live) for m in moments]
        return OfRank(rows, actions)


def held_tensors(engine: Engine) -> list[Tensor]:
    """Return the tensors that exist beyond a step: weights, gradient buffers, the model's buffers and constants."""
    modules = [stage.module for stage in engine.program.stages]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for buffer in engine.optimizer.buffers.buffers:
        tensors += [*buffer.kept_parameters, *buffer.kept_gradients]
        tensors += [tensor for bucket in buffer.buckets for tensor in (bucket.parameters, bucket.gradients)]
    return tensors


def registered_bytes(engine: Engine) -> int:
    """Return the bytes of buffers, constants and frozen parameters outside of gradient buffers, once per stage."""
    laid_out = _sizes(tensor for buffer in engine.optimizer.buffers.buffers for tensor in buffer.kept_parameters)
    total = 0
    for stage in engine.program.stages:
        own = [*stage.module.buffers(), *(p for p in stage.module.parameters() if not p.requires_grad)]
        total += sum(size for memory, size in _sizes(own).items() if memory not in laid_out)
    return total


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address → bytes of each storage."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _whole(rank: int, row: MemoryRow, most: int) -> list[Compared]:
    """Return the row of full weights and gradients, if ranks keep shards of them."""
    return [Compared(rank, "whole", row.whole, most, ALLOWED["whole"])] if row.whole or most else []


def measured_evaluation(decided: Plan, batch: dict[str, Tensor], weights: Path | None = None) -> list[Compared]:
    """Return the rows of an evaluation on this rank. ``weights``: a directory that the engine loads first."""
    rank = int(os.environ.get("RANK", "0"))
    with Engine(decided, mode="evaluate") as engine:
        if weights is not None:
            engine.load_pretrained(weights)
        engine.evaluate(batch)
        row = decided.evaluation_memory()[engine.mesh.pp_rank]
        most = _live(engine, engine.executor, batch)
        with suppress(PlanError):  # the loss looks up no probability of a label
            most = max(most, _live(engine, engine.scoring_executor(batch), batch, scores=True))
        rows = [
            Compared(rank, "parameters", row.parameters, held_bytes(engine), ALLOWED["parameters"]),
            Compared(rank, "activations", row.activations + row.communication, most, ALLOWED["activations"]),
            *_whole(rank, row, engine.optimizer.buffers.weights.most_bytes),
        ]
        with suppress(PlanError):  # generation or its cache is not possible: the same on every rank
            kept = kept_bytes(decided)[engine.mesh.pp_rank]
            rows.append(Compared(rank, KEPT, kept, engine.kept_bytes(), ALLOWED[KEPT]))
        return rows


def held_bytes(engine: Engine) -> int:
    """Return the bytes of all tensors of an engine between calls: weights, buffers, gradients, optimizer state."""
    state, buffers = engine.optimizer.measured_bytes(), engine.optimizer.buffers.buffers
    # full weights are freed between calls if ranks keep shards of them
    gathered = {id(p) for b in buffers for s in b.slots.values() for p in s.parameters}
    modules = [stage.module for stage in engine.program.stages]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers()) if id(t) not in gathered]
    tensors += [t for buffer in buffers for t in buffer.kept_parameters]
    return sum(_sizes(tensors).values()) + sum(state.values()) - state["parameters"]


def _live(engine: Engine, executor: Executor, batch: dict[str, Tensor], *, scores: bool = False) -> int:
    weights = [t for stage in executor.stages for t in (*stage.module.parameters(), *stage.module.buffers())]
    watch = MemoryWatch(executor, [*weights, *held_tensors(engine)])
    before, executor.around = executor.around, watch.around
    if scores:
        engine.score(batch)
    else:
        engine.evaluate(batch)
    executor.around = before
    return max(moment.live for moment in watch.moments)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes while an action ran: ``kept`` for all microbatches in flight, and ``live`` at its peak."""

    action: str
    kept: int
    live: int


class MemoryWatch:
    """Measures live and saved memory at each action of a step, in ``moments``.

    ``outside``: tensors that are not counted, in addition to the microbatches.
    """

    def __init__(self, executor: Executor, outside: Iterable[Tensor]) -> None:
        self.executor = executor
        self.moments: list[Moment] = []
        self._outside = {t.untyped_storage()._cdata: t for t in outside}  # kept alive, so that no address is reused
        self._allocations = Allocations(self._outside.values(), settling=SETTLING_SECONDS[0])
        self._saved: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.collect()
        gc.freeze()  # so that later collections are fast

    @contextmanager
    def around(self, action: Action, step: Step) -> Iterator[None]:
        self._allocations.know(t for microbatch in step.microbatches for t in microbatch.values())
        before = self._kept() if action.kind != "F" else 0
        self._allocations.peak = 0
        with self._allocations, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        kept = before if action.kind != "F" else self._kept()
        self.moments.append(Moment(str(action), kept, max(self._allocations.peak, self._allocations.live)))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._outside:
            self._saved[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return tensor

    def _kept(self) -> int:
        """Return the smallest of a few readings, as gloo's thread holds the tensor of a collective a little longer than
        its work takes."""
        gc.collect()  # free tensors in reference cycles
        readings = [self._held_bytes()]
        for seconds in SETTLING_SECONDS:
            time.sleep(seconds)
            readings.append(self._held_bytes())
        return min(readings)

    def _held_bytes(self) -> int:
        """Return the bytes between two actions, without messages in flight that no backward has saved."""
        known = self._allocations.known
        saved = {m: size for m, (storage, size) in self._saved.items() if not storage.expired() and m not in known}
        living = saved | self._allocations.living  # of compiled pieces only saved tensors are visible
        saved = set(saved)
        for of_microbatch in self.executor.in_flight:
            saved |= {t.untyped_storage()._cdata for t in of_microbatch.received}
        holders = Counter(t.untyped_storage()._cdata for t in self.executor.transport.buffers)
        # with a reference beside the buffers and Python's own object, it is an input of a recomputation
        in_use = torch._C._storage_Use_Count
        under_way = {memory for memory, count in holders.items() if in_use(memory) <= count + 1} - saved
        return sum(size for memory, size in living.items() if memory not in under_way)
