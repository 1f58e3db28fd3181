"""Every kind of schedule over pp × vpp × microbatches × group sizes, and one of them run under NCCL's rules."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.ops.random_state import RandomState
from planner.mesh import Mesh
from planner.pipeline.kinds import KINDS
from planner.pipeline.links import Message
from planner.pipeline.schedule import Action, Order, Schedule, build_schedule
from runtime.distributed.groups import Groups
from runtime.distributed.opening import communicators, make, use_in_turn
from runtime.pipeline.executor import Executor, Step
from runtime.pipeline.p2p import Transport
from tests.tools.limits import HANG_SECONDS
from tests.tools.nccl_rules import NcclRules, Outcome, run_ranks
from tests.tools.scale_stages import scale_batches, scale_stages

NUM_ELEMENTS = 2


def schedules(kind: str) -> list[Schedule]:
    """Those that the kind allows, each order once."""
    found: dict[tuple[Order, ...], Schedule] = {}
    for pp, vpp in product((2, 3, 4, 6), (1, 2, 3)):
        for microbatches in sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp, 3 * pp, 3 * pp + 1, 12, 16}):
            for group_size in sorted({pp, pp + 1, 2 * pp, 12, microbatches}):
                with suppress(PlanError):
                    schedule = build_schedule(kind, pp, microbatches, vpp, group_size)
                    found.setdefault(schedule.orders, schedule)
    return list(found.values())


class Ran(NamedTuple):
    """What a rank found: its share of the step's loss and of an evaluation's, and its weights' gradients."""

    loss: float
    evaluated: float
    gradients: list[float]


def run_schedule(
    schedule: Schedule,
    *,
    executor: type[Executor] = Executor,
    transport: type[Transport] = Transport,
    first_use: bool = True,
    lazy: bool = True,
    tells_ends: bool = False,
    with_flag: bool = False,
) -> Outcome:
    """A step and an evaluation of ``schedule``, on the real executor and transport."""

    def work(rank: int, rules: NcclRules) -> Ran:
        mesh = Mesh(pp=schedule.pp, vpp=schedule.vpp, fold=schedule.fold)
        groups = Groups(mesh, rank, torch.device("cpu"), timedelta(seconds=HANG_SECONDS), backend="nccl")
        groups.world = rules.new_group(range(mesh.world_size))  # pyright: ignore[reportAttributeAccessIssue]
        ordered = communicators(mesh, [])
        make(groups, ordered[1:])
        if first_use:
            use_in_turn(groups, ordered)
        stages = scale_stages(rank, schedule, NUM_ELEMENTS, with_flag=with_flag)
        between = transport(groups, schedule.num_stages, schedule.orders)
        between.settle = rules.at_end(between.settle)
        between.drain = rules.at_end(between.drain)
        runs = executor(stages, schedule.orders[rank], between, RandomState(0, 0))
        step = Step(0, scale_batches(schedule.num_microbatches, NUM_ELEMENTS), 0, [])
        loss, evaluated = runs.run(step), runs.evaluate(step)
        gradients = [stage.module.get_parameter("weight").grad for stage in stages]
        return Ran(
            0.0 if loss is None else loss.item(),
            0.0 if evaluated is None else evaluated.item(),
            [g.item() for g in gradients if g is not None],
        )

    return run_ranks(schedule.pp, work, lazy=lazy, tells_ends=tells_ends)


class CapOfFour(Transport):
    """A mutant, what once was: a fifth send waits for the first."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        if len(self._sending) == 4:
            self._sending.pop(next(iter(self._sending))).wait()
        super().send(message, tensors)


class WaitsForEachSend(Transport):
    """A mutant: each send is waited for where it is made."""

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        super().send(message, tensors)
        if message in self._sending:
            self._sending.pop(message).wait()


class PostsNextFirst(Executor):
    """A mutant: of the receives for this action and the next, that for the next is posted first."""

    held: Action | None = None

    def _post(self, action: Action) -> None:
        if self.held is None:
            self.held = action
            return
        super()._post(action)
        super()._post(self.held)
        self.held = None


MUTANTS: dict[str, dict[str, Any]] = {
    "no first use": {"first_use": False},
    "cap of four": {"transport": CapOfFour},
    "waits in the step": {"transport": WaitsForEachSend},
    "as it is": {},
}


def table() -> str:
    """Per kind of schedule how many cases there are, and how many of them get stuck."""
    rows = [f"{'':20}{'cases':>8}" + "".join(f"{name:>20}" for name in MUTANTS)]
    for kind in KINDS:
        cases = schedules(kind)
        counts = [sum(bool(run_schedule(case, **mutant).stuck) for case in cases) for mutant in MUTANTS.values()]
        rows.append(f"{kind:20}{len(cases):>8}" + "".join(f"{count:>20}" for count in counts))
    return "\n".join(rows)


if __name__ == "__main__":  # python -m tests.tools.pipeline_cases
    torch.set_num_threads(1)
    print(table())
