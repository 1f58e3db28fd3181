"""In which order a pipeline rank runs its microbatches: a schedule is data, one list of actions for each pp rank.

``planner.pipeline.kinds`` names those that are built by a rule. Which stage a chunk of a rank is says
``planner.fold``. Forwards run in the order of the schedule table: for each group of G microbatches, for each chunk, for
each microbatch of the group. The k-th backward takes the table's k-th row with its chunk counted from the end.
(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.)
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
    """The list of actions of a pp rank, ``rank``, cannot run."""

    def __init__(self, what: str, *, rank: int = 0, where: Where | str | None = None, fix: str) -> None:
        super().__init__(what, where=where, fix=fix)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Per pp rank the actions in the order in which it runs them.

    ``peak_in_flight``: of each rank the most pairs of microbatch and chunk between F and B; ``peak_waiting``: the most
    between B and W, if there are W.
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
    """One list of actions for each pp rank, each running every (microbatch, chunk) forward once and backward once.

    ``group_size`` is the G of the table. Backwards may be left out on all ranks together (kind ``forward``); the
    W are in all lists or in none. Raises PlanError when a list misses or repeats an action, or has
    a W before its B; whether the lists fit each other is for ``simulate`` to find.
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
        """The schedule table: (microbatch, chunk) of each forward in turn; a built kind has the same on every rank."""
        return tuple((a.microbatch, a.chunk) for a in self.orders[0] if a.kind == "F")

    def num_warmup(self, pp_rank: int) -> int:
        """Forwards of ``pp_rank`` before its steady one-forward-one-backward turns."""
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
    """The schedule of a kind in KINDS (None: interleaved_1f1b with vpp > 1, else 1f1b); a group is pp unless given.

    ``costs``: by which a kind that waits puts its W; equal ones if not given. Raises PlanError when the kind is
    unknown, the sizes do not fit it, or there are fewer microbatches than it needs.
    """
    kind, sizes = check_schedule(kind, pp, num_microbatches, vpp, group_size)
    of_all, costs = KINDS[kind].orders, costs or StageCosts.equal(pp * vpp)
    if of_all is not None:
        orders = of_all(pp, num_microbatches, costs)
    else:
        orders = _of_ranks(kind, sizes)
        if KINDS[kind].waits:  # no rank holds more than the first one does of 1f1b
            few = sizes._replace(num_microbatches=min(num_microbatches, 3 * pp))
            orders = with_weights(orders, orders if few == sizes else _of_ranks(kind, few), costs, pp)
    return Schedule(kind, pp, vpp, num_microbatches, sizes.group_size, orders, fold_of(kind))


def check_schedule(
    kind: str | None, pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None
) -> tuple[str, Sizes]:
    """The kind and the sizes that ``build_schedule`` takes. Raises PlanError if it would."""
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


def fold_of(asked: str | Schedule | None) -> Fold:
    """How a kind of schedule, or one by hand, lays its stages onto ranks; a kind outside of KINDS, in a loop."""
    if isinstance(asked, Schedule):
        return asked.fold
    return KINDS[asked].fold if asked in KINDS else LOOP


def _of_ranks(kind: str, sizes: Sizes) -> tuple[Order, ...]:
    return tuple(rank_order(kind, sizes, rank) for rank in range(sizes.pp))


def rank_order(kind: str, sizes: Sizes, pp_rank: int, extra_warmup: int = 0) -> Order:
    """The forwards and backwards of one rank, without the W of a kind that waits: those depend on all ranks.

    ``extra_warmup`` more forwards precede the first backward (1 to overlap experts).
    """
    table = schedule_table(sizes)
    forwards = [Action("F", m, c) for m, c in table]
    backwards = [Action("B", m, sizes.vpp - 1 - c) for m, c in table]
    return tuple(in_turn(forwards, backwards, num_warmup(kind, sizes, pp_rank, extra_warmup)))


def in_turn(forwards: list[Any], backwards: list[Any], warmup: int) -> list[Any]:
    """``warmup`` forwards, then one forward and one backward in turn, then the other backwards."""
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def schedule_table(sizes: Sizes) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward in turn: by group of microbatches, then chunk, then microbatch."""
    _, num_microbatches, vpp, group_size = sizes
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def num_warmup(kind: str, sizes: Sizes, pp_rank: int, extra_warmup: int = 0) -> int:
    """Forwards of a rank before its steady turns."""
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
