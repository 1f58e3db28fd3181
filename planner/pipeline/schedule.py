"""In which order a pipeline rank runs its microbatches: a schedule is data, one list of actions for each pp rank.

    gpipe              all forwards, then all backwards
    1f1b               pp - r - 1 warm-up forwards on rank r, then one forward and one backward in turn, then the rest
    interleaved_1f1b   the same over vpp chunks a rank, with (pp - r - 1)·2 + (vpp - 1)·G warm-up forwards
    zero_bubble        forwards and backwards as 1f1b; the gradients of weights where a rank would wait, by the costs
                       of each stage (planner.pipeline.zero_bubble)
    zero_bubble_v      two chunks a rank, folded into a v; all actions in the order in which work comes
                       (planner.pipeline.zero_bubble)

Which stage a chunk of a rank is says ``planner.fold``. Forwards run in the order of the schedule table: for each group
of G microbatches, for each chunk, for each microbatch of the group. The k-th backward takes the table's k-th row with
its chunk counted from the end. (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
section 2.2.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from passes.errors import PlanError, Where, require
from planner.fold import LOOP, Fold, V
from planner.mesh import Mesh
from planner.pipeline.actions import Action, Order, format_order, too_early
from planner.pipeline.zero_bubble import StageCosts, best_share, folded_orders, put_weights

FORWARD_ONLY, CUSTOM = "forward", "custom"
MOST_ACTIONS = 1 << 18  # of all pp ranks in a step: planning walks over them many times


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
        """Whether gradients of weights are actions of their own."""
        return any(action[0] == "W" for order in self.orders for action in order)

    def on(self, mesh: Mesh) -> Schedule:
        """The schedule of this row, over the stages of ``mesh``."""
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
        num_actions = 2 * self.pp * self.vpp * self.num_microbatches
        _require_few(num_actions, self.kind, self.pp, self.vpp, self.num_microbatches)
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
        """Whether gradients of weights are actions of their own."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    @property
    def table(self) -> tuple[tuple[int, int], ...]:
        """The schedule table: (microbatch, chunk) of each forward in turn; a built kind has the same on every rank."""
        return tuple((a.microbatch, a.chunk) for a in self.orders[0] if a.kind == "F")

    def num_warmup(self, pp_rank: int) -> int:
        """Forwards of ``pp_rank`` before its steady one-forward-one-backward turns."""
        total = self.num_microbatches * self.vpp
        if self.kind in KINDS and KINDS[self.kind].orders is None:
            return num_warmup(self.kind, self.pp, pp_rank, total, self.vpp, self.group_size)
        leading = next((i for i, action in enumerate(self.orders[pp_rank]) if action.kind == "B"), total + 1)
        return max(leading - 1, 0)


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
    kind, group_size = check_schedule(kind, pp, num_microbatches, vpp, group_size)
    of_all, costs = KINDS[kind].orders, costs or StageCosts.equal(pp * vpp)
    if of_all is not None:
        orders = of_all(pp, num_microbatches, costs)
    else:
        orders = tuple(rank_order(kind, pp, rank, num_microbatches, vpp, group_size) for rank in range(pp))
        orders = _with_weights(kind, orders, num_microbatches, costs) if KINDS[kind].waits else orders
    return Schedule(kind, pp, vpp, num_microbatches, group_size, orders, fold_of(kind))


def check_schedule(
    kind: str | None, pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None
) -> tuple[str, int]:
    """The kind and the size of a group that ``build_schedule`` takes. Raises PlanError if it would."""
    kind = kind or default_kind(vpp)
    group_size = pp if group_size is None else group_size
    _check_sizes(kind, pp, num_microbatches, vpp, group_size)
    return kind, group_size


def fold_of(asked: str | Schedule | None) -> Fold:
    """How a kind of schedule, or one by hand, lays its stages onto ranks; a kind outside of KINDS, in a loop."""
    if isinstance(asked, Schedule):
        return asked.fold
    return KINDS[asked].fold if asked in KINDS else LOOP


def _with_weights(kind: str, orders: tuple[Order, ...], num_microbatches: int, costs: StageCosts) -> tuple[Order, ...]:
    """No rank holds more than the first one does of 1f1b; the share of a wait is tried on few microbatches."""
    pp = len(orders)
    few = min(num_microbatches, 3 * pp)
    tried = orders
    if few < num_microbatches:
        tried = tuple(rank_order(kind, pp, rank, few, 1, pp) for rank in range(pp))
    return put_weights(orders, costs, pp, best_share(tried, costs, pp)).orders


def rank_order(
    kind: str, pp: int, pp_rank: int, num_microbatches: int, vpp: int, group_size: int, extra_warmup: int = 0
) -> Order:
    """The forwards and backwards of one rank, without the W of a kind that waits: those depend on all ranks.

    ``extra_warmup`` more forwards precede the first backward (1 to overlap experts).
    """
    table = schedule_table(num_microbatches, vpp, group_size)
    forwards = [Action("F", m, c) for m, c in table]
    backwards = [Action("B", m, vpp - 1 - c) for m, c in table]
    warmup = num_warmup(kind, pp, pp_rank, len(table), vpp, group_size, extra_warmup)
    steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
    return (*forwards[:warmup], *steady, *backwards[len(table) - warmup :])


def schedule_table(num_microbatches: int, vpp: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward in turn: by group of microbatches, then chunk, then microbatch."""
    starts = range(0, num_microbatches, group_size)
    return [
        (microbatch, chunk)
        for start in starts
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def num_warmup(kind: str, pp: int, pp_rank: int, total: int, vpp: int, group_size: int, extra_warmup: int = 0) -> int:
    """Warm-up forwards of a rank, of ``total`` = microbatches·vpp forwards in all."""
    return min(KINDS[kind].num_warmup(pp - pp_rank - 1, total, vpp, group_size) + extra_warmup, total)


def _check_sizes(kind: str, pp: int, num_microbatches: int, vpp: int, group_size: int) -> None:
    if kind not in KINDS:
        raise unknown_kind(kind)
    sizes = {"pp": pp, "microbatches": num_microbatches, "vpp": vpp, "group_size": group_size}
    for name, size in sizes.items():
        if size < 1:
            what = f"{kind} schedule: {name} = {size}"
            raise PlanError(what, where="pipeline.schedule", fix=f"set {name} to 1 or more")
    _require_few((2 + KINDS[kind].waits) * pp * vpp * num_microbatches, kind, pp, vpp, num_microbatches)
    if vpp > 1 and not KINDS[kind].runs_chunks:
        fix = f"use {' or '.join(k for k in KINDS if KINDS[k].runs_chunks)}, or set vpp to 1"
        raise PlanError(f"{kind} runs one chunk per rank, but vpp = {vpp}", where="mesh.vpp", fix=fix)
    KINDS[kind].check(pp, num_microbatches, vpp, group_size)


def _require_few(num_actions: int, kind: str, pp: int, vpp: int, num_microbatches: int) -> None:
    if num_actions > MOST_ACTIONS:
        raise PlanError(
            f"{kind}: pp {pp} · vpp {vpp} · {num_microbatches} microbatches make more than {MOST_ACTIONS} actions",
            where="batch.global",
            fix="choose a larger batch.micro, or a smaller batch.global",
        )


def _check_interleaved(pp: int, num_microbatches: int, vpp: int, group_size: int) -> None:
    if vpp == 1 or pp == 1:
        raise PlanError(
            f"interleaved_1f1b needs several chunks on several ranks, but pp = {pp} and vpp = {vpp}",
            where="mesh.vpp",
            fix="use 1f1b" if pp == 1 else "set vpp to 2 or more, or use 1f1b",
        )
    if num_microbatches < pp:
        raise PlanError(
            f"interleaved_1f1b over pp = {pp} ranks needs at least {pp} microbatches, because a rank starts its "
            f"next chunk after a group has passed all ranks, but there are {num_microbatches}",
            where="batch.global",
            fix=f"use {pp} microbatches or more (batch.global of at least {pp} · micro · dp), lower pp, or use 1f1b "
            "with vpp: 1, which runs any number",
        )
    _check_groups(pp, num_microbatches, group_size)


def _check_zero_bubble(pp: int, num_microbatches: int, vpp: int, group_size: int) -> None:
    if pp == 1:
        raise PlanError(
            "zero_bubble fills idle time of pipeline ranks, but with pp = 1 no rank idles",
            where="pipeline.schedule",
            fix="use 1f1b, or set mesh.pp to 2 or more",
        )


def _check_zero_bubble_v(pp: int, num_microbatches: int, vpp: int, group_size: int) -> None:
    if pp == 1:
        raise PlanError(
            "zero_bubble_v folds two rows of stages over the ranks of a pipeline, but pp = 1",
            where="pipeline.schedule",
            fix="use 1f1b with vpp: 1, or set mesh.pp to 2 or more",
        )
    if vpp != 2:
        raise PlanError(
            f"zero_bubble_v runs two chunks on each rank, down to the last rank and back, but vpp = {vpp}",
            where="mesh.vpp",
            fix="set vpp to 2, or use zero_bubble" if vpp == 1 else "set vpp to 2, or use interleaved_1f1b",
        )


def _check_groups(pp: int, num_microbatches: int, group_size: int) -> None:
    """A rank begins its next chunk when the group has passed all ranks: so no group may be smaller than pp."""
    if group_size < pp:
        raise PlanError(
            f"interleaved_1f1b: group size {group_size} is smaller than pp = {pp}, and the inputs of a chunk "
            "would arrive too late",
            where="pipeline.group_size",
            fix=f"set group_size to {pp} or more",
        )
    rest = num_microbatches % group_size
    if 0 < rest < pp:
        lower, upper = num_microbatches - rest, num_microbatches - rest + pp
        raise PlanError(
            f"interleaved_1f1b: {num_microbatches} microbatches in groups of {group_size} leave a last group of "
            f"{rest}, smaller than pp = {pp}",
            where="batch.global",
            fix=f"use {lower} or {upper} microbatches, or another group_size",
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """The definition of a kind of schedule; the rest follows from the table, or from ``orders``.

    ``num_warmup(ranks behind, total forwards, vpp, group_size)`` forwards precede a rank's first backward;
    ``check(pp, microbatches, vpp, group_size)`` raises PlanError for sizes that do not fit; ``runs_chunks``: several
    stages on a rank, laid there as ``fold`` says; ``waits``: gradients of weights are actions of their own.
    ``orders(pp, microbatches, costs)``: of a kind without a table, in which the order of each rank depends on the
    others. ``vpp``: the only one that it runs, if it runs chunks. ``repeats``: after its warm-up the ranks do the same
    for each group of microbatches. A search tries the kinds that are a default, and others with pp to
    ``searched_up_to``: what waits is placed by simulating all ranks, in a time that grows with pp².
    """

    num_warmup: Callable[[int, int, int, int], int]
    check: Callable[[int, int, int, int], None] = lambda pp, num_microbatches, vpp, group_size: None
    runs_chunks: bool = False
    fold: Fold = LOOP
    waits: bool = False
    orders: Callable[[int, int, StageCosts], tuple[Order, ...]] | None = None
    vpp: int | None = None
    repeats: bool = True
    is_default: bool = False
    searched_up_to: int = 0
    not_searched: str = ""  # why


KINDS = {
    "gpipe": Kind(
        lambda behind, total, vpp, group_size: total,
        repeats=False,
        not_searched="has the same bubble and needs more memory",
    ),
    "1f1b": Kind(lambda behind, total, vpp, group_size: behind, is_default=True),
    "interleaved_1f1b": Kind(
        lambda behind, total, vpp, group_size: behind * 2 + (vpp - 1) * group_size,
        _check_interleaved,
        runs_chunks=True,
        is_default=True,
    ),
    "zero_bubble": Kind(
        lambda behind, total, vpp, group_size: behind, _check_zero_bubble, waits=True, searched_up_to=16
    ),
    "zero_bubble_v": Kind(
        lambda behind, total, vpp, group_size: total,
        _check_zero_bubble_v,
        runs_chunks=True,
        fold=V,
        waits=True,
        orders=folded_orders,
        vpp=2,
        searched_up_to=8,
    ),
}


def default_kind(vpp: int) -> str:
    """The kind for ``vpp`` chunks on a rank if none is asked for."""
    return next(name for name, kind in KINDS.items() if kind.is_default and kind.runs_chunks == (vpp > 1))


def searched_kinds(pp: int, vpp: int, *, may_wait: bool) -> tuple[str, ...]:
    """The kinds that a search tries. ``may_wait``: gradients of weights may be actions of their own."""

    def is_tried(kind: Kind) -> bool:
        runs = kind.runs_chunks == (vpp > 1) and kind.vpp in (None, vpp)
        return runs and (kind.is_default or (1 < pp <= kind.searched_up_to and (may_wait or not kind.waits)))

    return tuple(name for name, kind in KINDS.items() if is_tried(kind))


def searched_words() -> tuple[str, str]:
    """Which kinds a search tries, and why not others; and those that it tries up to some pp."""
    others = ", ".join(f"{name} {kind.not_searched}" for name, kind in KINDS.items() if kind.not_searched)
    bounded = [f"{name} to pp {kind.searched_up_to}" for name, kind in KINDS.items() if kind.searched_up_to]
    up_to = ", ".join(bounded).replace(" to", " up to", 1)
    return f"{default_kind(1)}, or {default_kind(2)} if vpp > 1 ({others})", f"{up_to}, without CUDA graphs"


def unknown_kind(kind: str) -> PlanError:
    return PlanError(f"unknown schedule `{kind}`", where="pipeline.schedule", fix=f"choose one of {', '.join(KINDS)}")


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
