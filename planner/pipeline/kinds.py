"""The schedule kinds by name, and the sizes that each one accepts.

gpipe              all forwards, then all backwards
1f1b               pp - r - 1 warm-up forwards on rank r, then one forward and one backward in turn, then the rest
interleaved_1f1b   the same over vpp chunks per rank, with (pp - r - 1)·2 + (vpp - 1)·G warm-up forwards
zero_bubble        forwards and backwards as in 1f1b; weight gradients fill the waits of a rank, by the costs of each
                   stage (planner.pipeline.zero_bubble)
zero_bubble_v      two chunks per rank, folded into a v; a rank runs work as it becomes ready
                   (planner.pipeline.zero_bubble)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from passes.errors import PlanError
from planner.fold import LOOP, Fold, V
from planner.pipeline.actions import Order
from planner.pipeline.zero_bubble import StageCosts, folded_orders

MOST_ACTIONS = 1 << 18  # of all pp ranks in a step: planning walks over all actions many times


class Sizes(NamedTuple):
    """The sizes that determine each rank's order in a schedule kind. ``group_size``: the G of the schedule table."""

    pp: int
    num_microbatches: int
    vpp: int
    group_size: int

    @property
    def num_forwards(self) -> int:
        return self.num_microbatches * self.vpp

    def check_few(self, kind: str, num_actions: int) -> None:
        """Raise PlanError if ``num_actions``, of all ranks together, exceeds MOST_ACTIONS."""
        if num_actions > MOST_ACTIONS:
            raise PlanError(
                f"{kind}: pp {self.pp} · vpp {self.vpp} · {self.num_microbatches} microbatches make more than "
                f"{MOST_ACTIONS} actions",
                where="batch.global",
                fix="choose a larger batch.micro, or a smaller batch.global",
            )


@dataclass(frozen=True, slots=True)
class Kind:
    """The definition of a schedule kind; everything else follows from the schedule table, or from ``orders``.

    ``num_warmup(number of later ranks, sizes)``: forwards before a rank's first backward, at most all. ``check``
    raises PlanError for sizes that the kind cannot run. ``runs_chunks``: a rank has several stages, mapped by
    ``fold``; ``vpp``: the only number of them that it supports. ``waits``: weight gradients are separate actions (W).
    ``orders(pp, microbatches, costs)`` builds the orders of a kind without a table, in which ranks depend on each
    other. ``repeats``: after the warm-up, ranks repeat one pattern for each group of microbatches. A search tries the
    default kinds, and others for pp up to ``searched_up_to``: placing W simulates all ranks, in time that grows with
    pp².
    """

    num_warmup: Callable[[int, Sizes], int]
    check: Callable[[Sizes], None] = lambda sizes: None
    runs_chunks: bool = False
    fold: Fold = LOOP
    waits: bool = False
    orders: Callable[[int, int, StageCosts], tuple[Order, ...]] | None = None
    vpp: int | None = None
    repeats: bool = True
    is_default: bool = False
    searched_up_to: int = 0
    not_searched: str = ""  # the reason why a search does not try it


def _check_interleaved(sizes: Sizes) -> None:
    pp, num_microbatches, vpp, _ = sizes
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
    _check_groups(sizes)


def _check_zero_bubble(sizes: Sizes) -> None:
    if sizes.pp == 1:
        raise PlanError(
            "zero_bubble fills idle time of pipeline ranks, but with pp = 1 no rank idles",
            where="pipeline.schedule",
            fix="use 1f1b, or set mesh.pp to 2 or more",
        )


def _check_zero_bubble_v(sizes: Sizes) -> None:
    if sizes.pp == 1:
        raise PlanError(
            "zero_bubble_v folds two rows of stages over the ranks of a pipeline, but pp = 1",
            where="pipeline.schedule",
            fix="use 1f1b with vpp: 1, or set mesh.pp to 2 or more",
        )
    if sizes.vpp != 2:
        raise PlanError(
            f"zero_bubble_v runs two chunks on each rank, down to the last rank and back, but vpp = {sizes.vpp}",
            where="mesh.vpp",
            fix=f"set vpp to 2, or use {'zero_bubble' if sizes.vpp == 1 else 'interleaved_1f1b'}",
        )


def _check_groups(sizes: Sizes) -> None:
    """Raise PlanError for a group below pp: a rank starts its next chunk after a group has passed all ranks."""
    pp, num_microbatches, _, group_size = sizes
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


KINDS = {
    "gpipe": Kind(
        lambda behind, sizes: sizes.num_forwards,
        repeats=False,
        not_searched="has the same bubble and needs more memory",
    ),
    "1f1b": Kind(lambda behind, sizes: behind, is_default=True),
    "interleaved_1f1b": Kind(
        lambda behind, sizes: behind * 2 + (sizes.vpp - 1) * sizes.group_size,
        _check_interleaved,
        runs_chunks=True,
        is_default=True,
    ),
    "zero_bubble": Kind(lambda behind, sizes: behind, _check_zero_bubble, waits=True, searched_up_to=16),
    "zero_bubble_v": Kind(
        lambda behind, sizes: sizes.num_forwards,
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
    """Return the schedule kind for ``vpp`` chunks per rank when the spec names none."""
    return next(name for name, kind in KINDS.items() if kind.is_default and kind.runs_chunks == (vpp > 1))


def searched_kinds(pp: int, vpp: int, *, may_wait: bool) -> tuple[str, ...]:
    """Return the kinds that a search tries. ``may_wait``: kinds with W are allowed."""

    def is_tried(kind: Kind) -> bool:
        runs = kind.runs_chunks == (vpp > 1) and kind.vpp in (None, vpp)
        return runs and (kind.is_default or (1 < pp <= kind.searched_up_to and (may_wait or not kind.waits)))

    return tuple(name for name, kind in KINDS.items() if is_tried(kind))


def searched_words() -> tuple[str, str]:
    """Return two texts: the kinds that a search tries with why others are skipped; the kinds tried up to some pp."""
    others = ", ".join(f"{name} {kind.not_searched}" for name, kind in KINDS.items() if kind.not_searched)
    bounded = [f"{name} to pp {kind.searched_up_to}" for name, kind in KINDS.items() if kind.searched_up_to]
    up_to = ", ".join(bounded).replace(" to", " up to", 1)
    return f"{default_kind(1)}, or {default_kind(2)} if vpp > 1 ({others})", f"{up_to}, without CUDA graphs"


def unknown_kind(kind: str) -> PlanError:
    return PlanError(f"unknown schedule `{kind}`", where="pipeline.schedule", fix=f"choose one of {', '.join(KINDS)}")
