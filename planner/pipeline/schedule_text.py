"""A schedule as text, and back.

In text an action is ``F3.1``: forward of microbatch 3 on chunk 1; ``B3.1`` its backward; ``W3.1`` the gradients of its
weights, if they are an action of their own. A schedule is a head line and a line a rank:

    1f1b pp=2 vpp=1 microbatches=2 group=2
    0: F0.0 F1.0 B0.0 B1.0
    1: F0.0 B0.0 F1.0 B1.0

A list by hand over two chunks that run down the ranks and back says so: ``custom pp=2 vpp=2 … group=2 fold=v``.
"""

from __future__ import annotations

import re
from typing import cast

from passes.errors import PlanError
from planner.fold import Fold
from planner.pipeline.actions import Action, Order, format_order, without_weights
from planner.pipeline.schedule import CUSTOM, FORWARD_ONLY, KINDS, Schedule, build_schedule, fold_of, unknown_kind

_ACTION = re.compile(r"([FBW])(\d+)\.(\d+)")
_HEAD = re.compile(r"(\w+) pp=(\d+) vpp=(\d+) microbatches=(\d+) group=(\d+)(?: fold=(loop|v))?")


def parse_order(text: str) -> Order:
    """The inverse of ``format_order``. Raises PlanError at the first word that is no action."""
    return tuple(_parse_action(word) for word in text.split())


def format_schedule(schedule: Schedule) -> str:
    """The text form: a head line, then a line for each rank."""
    s = schedule
    head = f"{s.kind} pp={s.pp} vpp={s.vpp} microbatches={s.num_microbatches} group={s.group_size}"
    head += "" if s.fold == fold_of(s.kind) else f" fold={s.fold}"
    lines = [f"{rank}: {format_order(order)}" for rank, order in enumerate(s.orders)]
    return "\n".join([head, *lines]) + "\n"


def parse_schedule(text: str) -> Schedule:
    """The inverse of ``format_schedule``; lists unlike those of the kind in the head make a ``custom`` schedule.

    The places of W, and other choices by cost, are not compared: the text does not state the costs.

    Raises PlanError when the text is no schedule or an action is missing or repeated.
    """
    head, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    match = _HEAD.fullmatch(head)
    if not match:
        raise PlanError(
            f"schedule text begins with `{head}`, not with its sizes",
            fix="begin with a line like `1f1b pp=2 vpp=1 microbatches=4 group=2`",
        )
    kind, (pp, vpp, num_microbatches, group_size) = match[1], map(int, match.groups()[1:5])
    orders = tuple(parse_order(_strip_rank(line, rank)) for rank, line in enumerate(lines))
    if kind in KINDS:
        built = build_schedule(kind, pp, num_microbatches, vpp, group_size)
        alike = KINDS[kind].orders is not None
        alike = alike or tuple(map(without_weights, orders)) == tuple(map(without_weights, built.orders))
        kind = kind if alike and _has_weights(orders) == built.has_weights else CUSTOM
    elif kind not in (CUSTOM, FORWARD_ONLY):
        raise unknown_kind(kind)
    fold = cast(Fold, match[6] or fold_of(match[1]))
    return Schedule(kind, pp, vpp, num_microbatches, group_size, orders, fold)


def _has_weights(orders: tuple[Order, ...]) -> bool:
    return any(action.kind == "W" for order in orders for action in order)


def _strip_rank(line: str, rank: int) -> str:
    name, colon, actions = line.partition(":")
    if not colon or name.strip() != str(rank):
        what = f"schedule text: the line of pp rank {rank} begins with `{line[:20]}`"
        raise PlanError(what, fix=f"begin it with `{rank}:`")
    return actions


def _parse_action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if not match:
        fix = "write F, B or W, the microbatch, a dot, the chunk: F3.0"
        raise PlanError(f"schedule text: `{word}` is not an action", fix=fix)
    return Action(match[1], int(match[2]), int(match[3]))
