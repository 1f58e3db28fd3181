"""The messages between pipeline ranks, in order: the plan, the process groups and the transport all read them here.

    F   stage s sends its values to stage s + 1
    B   stage s + 1 sends the gradients of those values to stage s
    W   sends and receives nothing

A message holds the values that cross one stage boundary for one microbatch in one direction. A link carries all
messages of one direction between two ranks. It has no tags: its k-th send matches the k-th receive that the receiver
posts (NCCL). A rank sends in the order of its actions, and posts receives in that order, one action ahead. So a
schedule cannot deadlock if it completes in lock step (``simulate``), and if on every link

    the sender's actions that send over it, in order    =    the receiver's actions that receive from it, in order

even though a send completes only when its receive is posted. Proof: consider the first action that runs in lock step
but not on the ranks. Earlier actions sent its messages, and all messages before them on their links are received by
earlier actions of this rank; so they arrive.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from planner.fold import LOOP, Fold, rank_of, stage_of, stages_of
from planner.pipeline.actions import Action, Order, format_order
from planner.pipeline.schedule import OrderError, Schedule

_SHOWN_BEFORE, _SHOWN_AFTER = 2, 4


class Link(NamedTuple):
    """One direction between two pp ranks: values ("F") or gradients ("B") from ``sender`` to ``receiver``."""

    sender: int
    receiver: int
    kind: str


class Message(NamedTuple):
    """Values ("F") or gradients ("B") of one microbatch between stages ``boundary`` and ``boundary`` + 1."""

    kind: str
    boundary: int
    microbatch: int

    @property
    def sender(self) -> int:
        return self.boundary if self.kind == "F" else self.boundary + 1

    @property
    def receiver(self) -> int:
        return self.boundary + 1 if self.kind == "F" else self.boundary

    def link(self, pp: int, fold: Fold) -> Link | None:
        """Return the link that carries the message; None if both stages are on one rank."""
        sender, receiver = rank_of(self.sender, pp, fold), rank_of(self.receiver, pp, fold)
        return None if sender == receiver else Link(sender, receiver, self.kind)

    def crosses(self, num_stages: int, pp: int, fold: Fold) -> bool:
        """Whether its boundary exists among ``num_stages`` stages and lies between two ranks."""
        return 0 <= self.boundary < num_stages - 1 and self.link(pp, fold) is not None


class Progress:
    """The position of each action in the order of its rank, by (kind, microbatch, stage)."""

    def __init__(self, orders: Sequence[Order], fold: Fold) -> None:
        self.pp = len(orders)
        self.fold: Fold = fold
        self.positions = {
            (action.kind, action.microbatch, stage_of(rank, action.chunk, self.pp, fold)): at
            for rank, order in enumerate(orders)
            for at, action in enumerate(order)
        }

    def taken_over(self, sending: Iterable[Message], received: Message) -> list[Message]:
        """Return the messages of ``sending`` that the sender of ``received`` had consumed before it sent that one."""
        reached = self.positions.get((received.kind, received.microbatch, received.sender))
        if reached is None:
            return []
        rank = rank_of(received.sender, self.pp, self.fold)
        taken = (sent for sent in sending if rank_of(sent.receiver, self.pp, self.fold) == rank)
        return [sent for sent in taken if self.positions[sent.kind, sent.microbatch, sent.receiver] <= reached]


class RankMessages:
    """The messages of one rank along its ``order``. ``sending``: those sent and not known to be consumed.

    ``one_way``: stage boundaries that no gradient crosses.
    """

    def __init__(
        self, orders: Sequence[Order], rank: int, num_stages: int, fold: Fold, one_way: Collection[int] = ()
    ) -> None:
        self.order, self.rank, self.pp, self.num_stages = orders[rank], rank, len(orders), num_stages
        self.fold: Fold = fold
        self.one_way = one_way
        self.stages = stages_of(rank, self.pp, num_stages, fold)
        self.orders = orders
        self.sending: list[Message] = []

    @cached_property
    def progress(self) -> Progress:
        return Progress(self.orders, self.fold)

    def message(self, action: Action | None, by: Callable[[str, int, int], Message]) -> Message | None:
        """Return the message that ``by`` (sent_by or received_by) gives for an action; None if there is none."""
        if action is None or action.kind == "W":
            return None
        message = by(action.kind, self.stages[action.chunk], action.microbatch)
        has_boundary = 0 <= message.boundary < self.num_stages - 1
        return message if has_boundary and (message.kind == "F" or message.boundary not in self.one_way) else None

    def crossing(self, action: Action | None, by: Callable[[str, int, int], Message]) -> Message | None:
        """Return the same message if it travels between two ranks, else None."""
        message = self.message(action, by)
        return None if message is None or message.link(self.pp, self.fold) is None else message

    def taken_before(self, action: Action) -> list[Message]:
        """Remove from ``sending``, and return, the messages known to be consumed once ``action`` has its own."""
        received = self.crossing(action, received_by)
        taken = [] if received is None else self.progress.taken_over(self.sending, received)
        self.sending = [message for message in self.sending if message not in taken]
        return taken

    def send(self, action: Action) -> Message | None:
        """Record and return the message that ``action`` sends to another rank; None if it sends none."""
        message = self.crossing(action, sent_by)
        self.sending += [] if message is None else [message]
        return message


Carried = dict[Link, list[tuple[Message, Action]]]


def sent_by(kind: str, stage: int, microbatch: int) -> Message:
    """Return the message that the forward or backward of ``stage`` sends."""
    return Message(kind, stage if kind == "F" else stage - 1, microbatch)


def received_by(kind: str, stage: int, microbatch: int) -> Message:
    """Return the message that the forward or backward of ``stage`` receives."""
    return Message(kind, stage - 1 if kind == "F" else stage, microbatch)


def links(pp: int, vpp: int, fold: Fold = LOOP) -> tuple[Link, ...]:
    """Return all links of a pipeline, in the order in which every rank creates and first uses them."""
    crossing = (Message(kind, boundary, 0).link(pp, fold) for boundary in range(pp * vpp - 1) for kind in "FB")
    return tuple(dict.fromkeys(link for link in crossing if link is not None))


def check_links(schedule: Schedule) -> None:
    """Raise PlanError, with both orders around the first difference, if the two ends of a link differ in order."""
    of_ranks = [RankMessages(schedule.orders, r, schedule.num_stages, schedule.fold) for r in range(schedule.pp)]
    sent, received = ([carried(own, by) for own in of_ranks] for by in (sent_by, received_by))
    for link in links(schedule.pp, schedule.vpp, schedule.fold):
        out, into = sent[link.sender].get(link, []), received[link.receiver].get(link, [])
        pairs = enumerate(zip(out, into, strict=True))
        first = next((at for at, (mine, theirs) in pairs if mine[0] != theirs[0]), None)
        if first is not None:
            raise _differ(schedule, link, first, [a for _, a in out], [a for _, a in into])


def carried(own: RankMessages, by: Callable[[str, int, int], Message]) -> Carried:
    """Return, for each link, the messages that a rank sends (``by`` sent_by) or receives (received_by), each with the
    action that sends or needs it, in order.
    """
    by_link: Carried = {}
    for action in own.order:
        message = own.crossing(action, by)
        if message is not None and (link := message.link(own.pp, own.fold)) is not None:
            by_link.setdefault(link, []).append((message, action))
    return by_link


def _differ(schedule: Schedule, link: Link, first: int, out: Sequence[Action], into: Sequence[Action]) -> OrderError:
    what = "values" if link.kind == "F" else "gradients"
    return OrderError(
        f"schedule {schedule.kind} (pp = {schedule.pp}, vpp = {schedule.vpp}, {schedule.num_microbatches} microbatches)"
        f": rank {link.sender} sends {what} in another order than rank {link.receiver} receives them, from message "
        f"{first} on\n  rank {link.sender} sends them by   {_around(out, first)}\n"
        f"  rank {link.receiver} needs them for  {_around(into, first)}",
        rank=link.receiver,
        where="pipeline.schedule",
        fix=f"list these actions of rank {link.receiver} in the order in which rank {link.sender} runs its own",
    )


def _around(actions: Sequence[Action], at: int) -> str:
    start, stop = max(0, at - _SHOWN_BEFORE), at + _SHOWN_AFTER
    dots = ("… " if start else "", " …" if stop < len(actions) else "")
    return dots[0] + format_order(tuple(actions[start:stop])) + dots[1]
