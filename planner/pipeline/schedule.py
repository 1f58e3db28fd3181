"""Pipeline schedules. A schedule is data: for each pp rank, the list of its actions in order.

``planner.pipeline.kinds`` defines the schedules that are built by a rule, ``planner.fold`` the stages of each rank.
Forwards run in the order of the schedule table: for each group of G microbatches, for each chunk, for each microbatch
of the group. The k-th backward takes the k-th row of the table, with its chunk counted from the last one. (Narayanan
et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from passes.errors import PlanError, Where, require
from planner.fold import LOOP, Fold
from planner.mesh import Mesh
from planner.pipeline.actions import Action, Order, format_order, has_weights, too_early
from planner.pipeline.kinds import KINDS, MOST_ACTIONS, Sizes, default_kind, unknown_kind
from planner.pipeline.zero_bubble import StageCosts, with_weights

FORWARD_ONLY, CUSTOM = "forward", "custom"


class OrderError(PlanError):
    """Raised when the actions of pp rank ``rank`` cannot run in their order."""

    def __init__(self, what: str, *, rank: int = 0, where: Where | str | None = None, fix: str) -> None:
        super().__init__(what, where=where, fix=fix)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The schedule as a plan shows it: the actions of each pp rank, in order.

    ``peak_in_flight``: for each rank, the most (microbatch, chunk) pairs between F and B; ``peak_waiting``: the most
    between B and W, empty without W.
    """

    kind: str
    num_microbatches: int
    orders: tuple[Order, ...]
    bubble_fraction: float = 0.0
    peak_in_flight: tuple[int, ...] = ()
    peak_waiting: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(sum(map(len, self.orders)) <= MOST_ACTIONS, f"the schedule has more than {MOST_ACTIONS} actions")
        for rank, order in enumerate(self.orders):
            forwards, backwards, weights = ({a[1:] for a in order if a[0] == kind} for kind in "FBW")
            complete = forwards == backwards and len(order) == (2 + self.has_weights) * len(forwards)
            require(complete, f"pp rank {rank} does not run each forward and its backward once")
            require(
                weights == (backwards if self.has_weights else set()), f"pp rank {rank} lacks a W for its backwards"
            )
            early = too_early(order)
            require(early is None, f"pp rank {rank} runs {early} before its backward")

    @property
    def has_weights(self) -> bool:
        return has_weights(self.orders)

    def on(self, mesh: Mesh) -> Schedule:
        sizes = (mesh.pp, mesh.vpp, self.num_microbatches, mesh.pp)
        return Schedule(self.kind if self.kind in KINDS else CUSTOM, *sizes, self.orders, mesh.fold)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each pp rank, in order: one F and one B for each microbatch and chunk.

    ``group_size`` is the G of the table. The kind ``forward`` has no B; all ranks have W, or none has. Raises
    PlanError if a rank lacks or repeats an action, or runs a W before its B. ``simulate`` finds deadlocks.
    """

    kind: str
    pp: int
    vpp: int
    num_microbatches: int
    group_size: int
    orders: tuple[Order, ...]
    fold: Fold = LOOP

    def __post_init__(self) -> None:
        self.sizes.check_few(self.kind, 2 * self.pp * self.sizes.num_forwards)
        if len(self.orders) != self.pp:
            raise PlanError(
                f"schedule has {len(self.orders)} lists of actions for pp = {self.pp} ranks",
                fix="give one list per rank",
            )
        cells = [(m, c) for m in range(self.num_microbatches) for c in range(self.vpp)]
        kinds = "F" if self.kind == FORWARD_ONLY else "FBW" if self.has_weights else "FB"
        expected = sorted(Action(kind, m, c) for kind in kinds for m, c in cells)
        for rank, order in enumerate(self.orders):
            if sorted(order) != expected:
                raise _not_each_once(rank, order, expected)
            early = too_early(order)
            if early is not None:
                raise _before_its_backward(rank, order, early)

    @property
    def has_weights(self) -> bool:
        return has_weights(self.orders)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.pp, self.num_microbatches, self.vpp, self.group_size)

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    @property
    def table(self) -> tuple[tuple[int, int], ...]:
        """The schedule table: (microbatch, chunk) of each forward in turn, the same on every rank of a built kind."""
        return tuple((a.microbatch, a.chunk) for a in self.orders[0] if a.kind == "F")

    def num_warmup(self, pp_rank: int) -> int:
        """Return the number of warm-up forwards of ``pp_rank``, before its one-forward-one-backward turns."""
        if self.kind in KINDS and KINDS[self.kind].orders is None:
            return num_warmup(self.kind, self.sizes, pp_rank)
        first = next((at for at, action in enumerate(self.orders[pp_rank]) if action.kind == "B"), None)
        return self.sizes.num_forwards if first is None else max(first - 1, 0)


def build_schedule(
    kind: str | None,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    costs: StageCosts | None = None,
) -> Schedule:
    """Build the schedule of a kind in KINDS (None: interleaved_1f1b with vpp > 1, else 1f1b); groups are pp by default.

    ``costs`` decide where a kind with W places them (default: equal costs). Raises PlanError if the kind is unknown or
    cannot run these sizes.
    """
    kind, sizes = check_schedule(kind, pp, num_microbatches, vpp, group_size)
    build, costs = KINDS[kind].orders, costs or StageCosts.equal(pp * vpp)
    if build is not None:
        orders = build(pp, num_microbatches, costs)
    else:
        orders = _of_ranks(kind, sizes)
        if KINDS[kind].waits:  # with pp as its limit, no rank holds more microbatches than the first rank in 1f1b
            few = sizes._replace(num_microbatches=min(num_microbatches, 3 * pp))
            orders = with_weights(orders, orders if few == sizes else _of_ranks(kind, few), costs, pp)
    return Schedule(kind, pp, vpp, num_microbatches, sizes.group_size, orders, fold_of(kind))


def check_schedule(
    kind: str | None, pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None
) -> tuple[str, Sizes]:
    """Return the kind and the sizes that ``build_schedule`` uses. Raises PlanError if they cannot run."""
    kind = kind or default_kind(vpp)
    if kind not in KINDS:
        raise unknown_kind(kind)
    sizes = Sizes(pp, num_microbatches, vpp, pp if group_size is None else group_size)
    for name, size in zip(("pp", "microbatches", "vpp", "group_size"), sizes, strict=True):
        if size < 1:
            what = f"{kind} schedule: {name} = {size}"
            raise PlanError(what, where="pipeline.schedule", fix=f"set {name} to 1 or more")
    sizes.check_few(kind, (2 + KINDS[kind].waits) * pp * sizes.num_forwards)
    if vpp > 1 and not KINDS[kind].runs_chunks:
        fix = f"use {' or '.join(k for k in KINDS if KINDS[k].runs_chunks)}, or set vpp to 1"
        raise PlanError(f"{kind} runs one chunk per rank, but vpp = {vpp}", where="mesh.vpp", fix=fix)
    KINDS[kind].check(sizes)
    return kind, sizes


def fold_of(schedule: str | Schedule | None) -> Fold:
    """Return how a schedule, or a schedule kind, maps stages to ranks; LOOP for a kind outside of KINDS."""
    if isinstance(schedule, Schedule):
        return schedule.fold
    return KINDS[schedule].fold if schedule in KINDS else LOOP


def _of_ranks(kind: str, sizes: Sizes) -> tuple[Order, ...]:
    return tuple(rank_order(kind, sizes, rank) for rank in range(sizes.pp))


def rank_order(kind: str, sizes: Sizes, pp_rank: int, extra_warmup: int = 0) -> Order:
    """Return the forwards and backwards of one rank. The places of W depend on all ranks (``with_weights``).

    ``extra_warmup``: further warm-up forwards (1 to overlap the exchanges of experts).
    """
    table = schedule_table(sizes)
    forwards = [Action("F", m, c) for m, c in table]
    backwards = [Action("B", m, sizes.vpp - 1 - c) for m, c in table]
    return tuple(in_turn(forwards, backwards, num_warmup(kind, sizes, pp_rank, extra_warmup)))


def in_turn(forwards: list[Any], backwards: list[Any], warmup: int) -> list[Any]:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def schedule_table(sizes: Sizes) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of each forward in turn: by group of microbatches, then chunk, then microbatch."""
    _, num_microbatches, vpp, group_size = sizes
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def num_warmup(kind: str, sizes: Sizes, pp_rank: int, extra_warmup: int = 0) -> int:
    """Return the number of warm-up forwards of a rank."""
    return min(KINDS[kind].num_warmup(sizes.pp - pp_rank - 1, sizes) + extra_warmup, sizes.num_forwards)


def _not_each_once(rank: int, order: Order, expected: list[Action]) -> PlanError:
    missing = sorted(set(expected) - set(order))
    foreign = sorted(set(order) - set(expected))
    repeated = sorted(action for action, n in Counter(order).items() if n > 1)
    for word, actions in (("misses", missing), ("has no place for", foreign), ("repeats", repeated)):
        if actions:
            return OrderError(
                f"schedule: pp rank {rank} {word} {format_order(tuple(actions[:8]))}",
                rank=rank,
                fix="run each microbatch's forward and backward exactly once on each chunk, and a W for all or none",
            )
    raise AssertionError("the lists are equal")


def _before_its_backward(rank: int, order: Order, early: Action) -> PlanError:
    backward = early._replace(kind="B")
    at = order.index(early)
    return OrderError(
        f"schedule: pp rank {rank} runs {early} before {backward}, on which it depends: "
        f"{format_order(order[max(0, at - 2) : at + 1])}",
        rank=rank,
        where="pipeline.schedule",
        fix=f"put {early} after {backward} in the list of rank {rank}",
    )
