"""The messages between the ranks of a pipeline, in order: one truth for plan, process groups and transport.

    F   stage s sends its values to stage s + 1
    B   stage s + 1 sends the gradients of those values to stage s
    W   sends and receives nothing

A message holds the values that cross one boundary for one microbatch in one direction. A link carries the messages of
one sender, one receiver and one direction, and has no tags: its k-th send matches the k-th receive that the other side
has posted (NCCL). A rank sends in the order of its actions, and posts its receives in that order too, those of the next
action ahead of the action that it runs. So a schedule runs on links if, on every link,

    the sender's actions that send there, in their order    =    the receiver's actions that receive from there

and if it ends in lock step (``simulate``). Then nothing waits for ever, though a send is through only when its receive
is posted: take the first action that lock step runs and the ranks do not. Its messages were sent by earlier actions,
behind nothing but messages that earlier actions of this rank receive; so they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from passes.errors import PlanError
from planner.fold import LOOP, Fold, rank_of, stage_of
from planner.pipeline.actions import Action, Order, format_order, without_weights
from planner.pipeline.schedule import Schedule

_SHOWN_BEFORE, _SHOWN_AFTER = 2, 4


class Link(NamedTuple):
    """One direction between two pp ranks: values ("F") or gradients ("B") from ``sender`` to ``receiver``."""

    sender: int
    receiver: int
    kind: str


class Message(NamedTuple):
    """Values ("F") or gradients ("B") of the boundary below stage ``boundary``, for one microbatch."""

    kind: str
    boundary: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage that sends it."""
        return self.boundary if self.kind == "F" else self.boundary + 1

    @property
    def receiver(self) -> int:
        """The stage that receives it."""
        return self.boundary + 1 if self.kind == "F" else self.boundary

    def link(self, pp: int, fold: Fold) -> Link | None:
        """The link that carries it; None if both stages are on one rank."""
        sender, receiver = rank_of(self.sender, pp, fold), rank_of(self.receiver, pp, fold)
        return None if sender == receiver else Link(sender, receiver, self.kind)

    def crosses(self, num_stages: int, pp: int, fold: Fold) -> bool:
        """Whether a pipeline of ``num_stages`` has its boundary, and between two ranks."""
        return 0 <= self.boundary < num_stages - 1 and self.link(pp, fold) is not None


class Progress:
    """Owns: the place of each action in the order of its rank, by (kind, microbatch, stage)."""

    def __init__(self, orders: Sequence[Order], fold: Fold) -> None:
        self.pp = len(orders)
        self.fold: Fold = fold
        self.positions = {
            (action.kind, action.microbatch, stage_of(rank, action.chunk, self.pp, fold)): at
            for rank, order in enumerate(orders)
            for at, action in enumerate(order)
        }

    def taken_over(self, sending: Iterable[Message], received: Message) -> list[Message]:
        """The messages of ``sending`` that the sender of ``received`` had used when it sent that."""
        reached = self.positions.get((received.kind, received.microbatch, received.sender))
        if reached is None:
            return []
        rank = rank_of(received.sender, self.pp, self.fold)
        taken = (sent for sent in sending if rank_of(sent.receiver, self.pp, self.fold) == rank)
        return [sent for sent in taken if self.positions[sent.kind, sent.microbatch, sent.receiver] <= reached]


Carried = dict[Link, list[tuple[Message, Action]]]


def sent_by(kind: str, stage: int, microbatch: int) -> Message:
    """The message that the forward or backward of ``stage`` sends."""
    return Message(kind, stage if kind == "F" else stage - 1, microbatch)


def received_by(kind: str, stage: int, microbatch: int) -> Message:
    """The message that the forward or backward of ``stage`` needs from its neighbour."""
    return Message(kind, stage - 1 if kind == "F" else stage, microbatch)


def links(pp: int, vpp: int, fold: Fold = LOOP) -> tuple[Link, ...]:
    """Every link of a pipeline, in the one order in which all ranks make and first use them."""
    crossing = (Message(kind, boundary, 0).link(pp, fold) for boundary in range(pp * vpp - 1) for kind in "FB")
    return tuple(dict.fromkeys(link for link in crossing if link is not None))


def sends(order: Order, pp: int, pp_rank: int, num_stages: int, fold: Fold = LOOP) -> Carried:
    """The messages that ``pp_rank`` sends on each link, with their actions, in order of sending."""
    return _by_link(order, pp, pp_rank, num_stages, fold, sent_by)


def receives(order: Order, pp: int, pp_rank: int, num_stages: int, fold: Fold = LOOP) -> Carried:
    """The messages that ``pp_rank`` receives from each link, with the actions that need them, in order of posting."""
    return _by_link(order, pp, pp_rank, num_stages, fold, received_by)


def check_links(schedule: Schedule) -> None:
    """Raises PlanError, with both orders around the first difference, if a link's two ends differ."""
    pp, num_stages, fold = schedule.pp, schedule.num_stages, schedule.fold
    sent = [sends(order, pp, rank, num_stages, fold) for rank, order in enumerate(schedule.orders)]
    received = [receives(order, pp, rank, num_stages, fold) for rank, order in enumerate(schedule.orders)]
    for link in links(pp, schedule.vpp, fold):
        out, into = sent[link.sender].get(link, []), received[link.receiver].get(link, [])
        pairs = enumerate(zip(out, into, strict=True))
        first = next((at for at, (mine, theirs) in pairs if mine[0] != theirs[0]), None)
        if first is not None:
            raise _differ(schedule, link, first, [a for _, a in out], [a for _, a in into])


def _by_link(
    order: Order, pp: int, pp_rank: int, num_stages: int, fold: Fold, crossing: Callable[[str, int, int], Message]
) -> Carried:
    found: Carried = {}
    for action in without_weights(order):
        message = crossing(action.kind, stage_of(pp_rank, action.chunk, pp, fold), action.microbatch)
        if message.crosses(num_stages, pp, fold) and (link := message.link(pp, fold)):
            found.setdefault(link, []).append((message, action))
    return found


def _differ(schedule: Schedule, link: Link, first: int, out: Sequence[Action], into: Sequence[Action]) -> PlanError:
    what = "values" if link.kind == "F" else "gradients"
    return PlanError(
        f"schedule {schedule.kind} (pp = {schedule.pp}, vpp = {schedule.vpp}, {schedule.num_microbatches} microbatches)"
        f": rank {link.sender} sends {what} in another order than rank {link.receiver} receives them, from message "
        f"{first} on\n  rank {link.sender} sends them by   {_around(out, first)}\n"
        f"  rank {link.receiver} needs them for  {_around(into, first)}",
        where="pipeline.schedule",
        fix=f"list these actions of rank {link.receiver} in the order in which rank {link.sender} runs its own",
    )


def _around(actions: Sequence[Action], at: int) -> str:
    start, stop = max(0, at - _SHOWN_BEFORE), at + _SHOWN_AFTER
    dots = ("… " if start else "", " …" if stop < len(actions) else "")
    return dots[0] + format_order(tuple(actions[start:stop])) + dots[1]
