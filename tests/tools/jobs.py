"""What ranks run in place of the usual steps; each returns what a test compares, from every rank."""

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

import planner
from passes.base import RankProgram
from passes.errors import PlanError
from passes.ops.dropout import stream_dropout
from planner.lower import lower
from planner.mesh import Mesh
from planner.sharding.buckets import lay_out
from planner.sharding.buffers import Buffer
from planner.sharding.shards import Shards
from runtime import Engine
from runtime.distributed import opening
from runtime.distributed.faults.failure import StepError
from runtime.distributed.groups import Groups
from runtime.engine.build import parameters_of
from runtime.verify.mutants import num_collectives, without_collective
from tests.tools.comparison import Found
from tests.tools.laboratory import steps
from tests.tools.limits import HANG_SECONDS

Batches = list[dict[str, Tensor]]


def gradients_of(plan: Any, batch: dict[str, Tensor], program: RankProgram | None) -> Found:
    """Loss, norm and gradients of one batch, with the modules of ``program``."""
    with Engine(plan, program=program, timeout_seconds=HANG_SECONDS) as engine:
        loss = engine.forward_backward(batch)
        gradients = engine.gather_gradients()
        return Found([loss], [engine.optimizer_step().grad_norm], dict(gradients), {}, loss)


def without_each_collective(plan: Any, batches: Batches) -> list[Found]:
    """The whole program first, then one run without each exchange of the lowered graphs."""
    rank = torch.distributed.get_rank()
    programs = [None, *(without_collective(plan, rank, n) for n in range(num_collectives(plan)))]
    return [gradients_of(plan, batches[0], program) for program in programs]


def without_each_sum_of_a_step(plan: Any, batches: Batches) -> dict[str, Found]:
    """One run for each parameter whose gradient is summed over tp, etp or stages at a step's end, without that sum."""
    found = {}
    for row in plan.parameters:
        for axis in ("tp", "etp", "embedding"):
            shards, changed = _forget_sum(plan.shards, plan.mesh, row.name, axis)
            if changed:
                found[f"{row.name} over {axis}"] = gradients_of(
                    dataclasses.replace(plan, shards=shards), batches[0], None
                )
    return found


def _forget_sum(shards: Shards, mesh: Mesh, fqn: str, axis: str) -> tuple[Shards, bool]:
    """The buffers of all ranks without that sum, and whether any rank has lost one: all of them run then."""
    places = [(pp, ep) for pp in range(mesh.pp) for ep in range(mesh.ep)]
    held = [b.by_name[fqn] for place in places for b in shards.buffers_of_rank(*place) if fqn in b.by_name]
    elsewhere = shards.elsewhere
    changed = dataclasses.replace(
        shards,
        buffers=_without_sum(shards.buffers, fqn, axis),
        elsewhere=None if elsewhere is None else lambda pp, ep: _without_sum(elsewhere(pp, ep), fqn, axis),
    )
    return changed, any(axis in local.partial_over for local in held)


def _without_sum(given: tuple[Buffer, ...], fqn: str, axis: str) -> tuple[Buffer, ...]:
    """One parameter, in a buffer of its own, is not summed over ``axis``."""
    buffers = []
    for buffer in given:
        mine = buffer.by_name.get(fqn)
        if mine is None or axis not in mine.partial_over:
            buffers.append(buffer)
            continue
        rest = tuple(p for p in buffer.parameters if p.fqn != fqn)
        partial = dataclasses.replace(mine, partial_over=tuple(a for a in mine.partial_over if a != axis))
        for members in (rest, (partial,)):
            layout = lay_out([(p.fqn, prod(p.shape)) for p in members], buffer.layout.num_ranks)
            buffers += [dataclasses.replace(buffer, parameters=members, layout=layout)] if members else []
    return tuple(buffers)


def with_and_without_edp(plan: Any, batches: Batches) -> list[Found]:
    """Gradients of experts summed over the ranks that hold the same ones, then over none. Of buffers held whole."""
    found = [gradients_of(plan, batches[0], None)]
    real = opening.make

    def alone(groups: Groups, ordered: Any) -> None:
        real(groups, ordered)
        groups.by_name.pop("edp", None)

    opening.make = alone  # this process is a fork, and ends after the job
    return [*found, gradients_of(plan, batches[0], None)]


def dropout_masks(plan: Any, batches: Batches) -> dict[str, tuple[bool, Tensor]]:
    """For each dropout of this rank, by its captured name: whether it is inside a parallel region, and its mask."""
    program = lower(plan, torch.distributed.get_rank(), thorough=True)
    program.random.begin(step=1, microbatch=2)
    found = {}
    for stage in program.stages:
        for node in stage.module.graph.nodes:
            if node.target is stream_dropout:
                _, p, _, op, sharded = node.args
                mask = stream_dropout(torch.ones(64), p, program.random, op, sharded)
                found[node.meta["origin"]] = (sharded, mask)
    return found


def two_engines(plan: Any, batches: Batches) -> list[Found | None]:
    """Two engines of one plan, one after the other in the same process."""
    return [steps(plan, batches), steps(plan, batches)]


def train_steps(plan: Any, batches: Batches, local: bool) -> Found | None:
    """train_step alone; ``local``: each dp rank gives its own share, as a DistributedSampler would."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        size = len(batches[0]["input_ids"]) // engine.mesh.dp_size
        rows = slice(engine.mesh.dp_rank * size, (engine.mesh.dp_rank + 1) * size) if local else slice(None)
        given = [{name: value[rows] for name, value in batch.items()} for batch in batches]
        reports = [engine.train_step(batch, local=local) for batch in given]
        evaluated = engine.evaluate(given[0], local=local)
        parameters = engine.gather_parameters()
    return (
        Found([r.loss for r in reports], [r.grad_norm for r in reports], {}, parameters, evaluated)
        if parameters
        else None
    )


def losses_without_updates(plan: Any, batches: Batches) -> list[float]:
    """The loss of one batch three times; with dropout, each step draws its own masks."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.train_step(batches[0]).loss for _ in range(3)]


def error_of(run: Any) -> str:
    """The words of the PlanError that ``run`` raises; empty if there is none."""
    try:
        run()
    except PlanError as error:
        return str(error)
    return ""


def plans_that_differ(plan: Any, batches: Batches) -> str:
    """The last rank was started with another spec."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        plan = dataclasses.replace(plan, spec={**plan.spec, "seed": 99})
    return error_of(lambda: Engine(plan, timeout_seconds=HANG_SECONDS))


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "a key too few": lambda batch: {"input_ids": batch["input_ids"]},
    "a key too many": lambda batch: batch | {"extra": batch["input_ids"]},
    "too few sequences": lambda batch: {name: value[:-1] for name, value in batch.items()},
    "other length": lambda batch: {name: value[:, :-1] for name, value in batch.items()},
    "other dtype": lambda batch: {name: value.int() for name, value in batch.items()},
    "no tensor": lambda batch: {name: value.tolist() for name, value in batch.items()},
    "other tokens": lambda batch: {name: value.roll(1, 0) for name, value in batch.items()},
}


def batch_of_one_rank(plan: Any, batches: Batches, change: str) -> str:
    """The last rank gives another batch than the others. No step ran: no rank counted a collective."""
    batch = batches[0]
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        batch = CHANGES[change](batch)
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        found = error_of(lambda: engine.train_step(batch))
        assert not any(axis.counts for axis in engine.program.axes.values())
    return found


def bad_batch(plan: Any, batches: Batches, change: str) -> str:
    """Every rank gives the same bad batch, as its second one; then a good one shows that nothing was left half done."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        found = error_of(lambda: engine.train_step(CHANGES[change](batches[1])))
        assert engine.train_step(batches[1]).loss > 0
    return found


def plan_for_another_world(plan: Any, batches: Batches, mesh: dict[str, int]) -> str:
    """A plan for another number of ranks than were started."""
    other = planner.plan(plan.model, {**plan.spec, "mesh": mesh})
    return error_of(lambda: Engine(other, timeout_seconds=HANG_SECONDS))


def id_errors(plan: Any, batches: Batches, name: str, value: int) -> tuple[str, str]:
    """The words about a batch that holds ``value`` once under ``name``: of its check, and of a step without that."""
    batch = {**batches[0], name: batches[0][name].clone()}
    batch[name][0, 0] = value
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        checked = error_of(lambda: engine.train_step(batch))
        engine._now.intake.check = lambda *_, **__: None
        try:
            engine.train_step(batch)
        except StepError as error:
            return checked, str(error)
    return checked, ""


def own_parameters(engine: Engine) -> dict[str, Tensor]:
    """By dotted name; of a tied weight's copies any, they are equal."""
    return {local.fqn: parameter.data for local, parameter in parameters_of(engine.program)}
