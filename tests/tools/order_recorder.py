"""What each rank asks of its process groups, in order, and whether it would end on any backend.

    same       the members of a communicator call the same collectives; what one sends over it the other receives
    no cycle   a collective holds a rank until all members come, the wait for a message until its other side is posted:
               the orders of all ranks together are one order
    device     every tensor lies where the communicator's backend reads it

The record is made below Python, where torch dispatches the calls: under which name one was called does not matter. What
a reduction does (sum, max) cannot be read there, and is noted one floor above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import networkx
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MESSAGES = {"send": "send", "recv_": "recv"}
REDUCTIONS = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base")


class Call(NamedTuple):
    """``group`` is the communicator's name, the same on all members. ``details``: shapes, dtypes, sum or max, root.

    ``peer`` is the other side of a message, by its global rank; None for a collective. The call "wait" has in its
    details the place of the message that is waited for, among this rank's calls.
    """

    group: str
    op: str
    details: tuple[Any, ...]
    devices: frozenset[str]
    peer: int | None = None


class Recorder(TorchDispatchMode):
    """Owns: the calls of this rank while it is open, and the members of each communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.members: dict[str, tuple[int, ...]] = {}
        self._patch = pytest.MonkeyPatch()
        self._reduction = ""
        self._works: dict[int, tuple[Any, int]] = {}  # by id: a message's work, kept so that no other gets its id

    def __enter__(self) -> Recorder:
        group, work = dist.ProcessGroup, dist.Work
        for name in REDUCTIONS:
            self._patch.setattr(group, name, self._noting(getattr(group, name)))
        for name in ("send", "recv"):
            self._patch.setattr(group, name, self._numbering(getattr(group, name)))
        self._patch.setattr(work, "wait", self._waiting(work.wait))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func._schema, args)
        return func(*args, **(kwargs or {}))

    def _noting(self, real: Any) -> Any:
        """A reduction of a process group, which notes whether it is of sums or of what else."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given = (getattr(arg, "reduceOp", arg) for arg in (*args, *kwargs.values()))
            kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
            op = next((arg for arg in given if isinstance(arg, kinds)), dist.ReduceOp.SUM)
            names = dist.ReduceOp.RedOpType.__members__
            self._reduction = next(name for name, member in names.items() if op == member)
            return real(*args, **kwargs)

        return call

    def _numbering(self, real: Any) -> Any:
        """A send or receive of a process group, which keeps the place of its call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            work = real(*args, **kwargs)
            self._works[id(work)] = work, len(self.calls) - 1
            return work

        return call

    def _waiting(self, real: Any) -> Any:
        """A work's ``wait``, which records itself where the work is a message's."""

        def call(work: Any, *args: Any) -> Any:
            if id(work) in self._works:
                at = self._works[id(work)][1]
                self.calls.append(self.calls[at]._replace(op="wait", details=(at,), devices=frozenset()))
            return real(work, *args)

        return call

    def _record(self, schema: Any, args: tuple[Any, ...]) -> None:
        given = dict(zip((a.name for a in schema.arguments), args, strict=False))
        group = dist.ProcessGroup.unbox(given["process_group"])
        members = tuple(dist.get_process_group_ranks(group))
        op = schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)] if op != "barrier" else []
        peer = given.get("dst", given.get("src"))
        details = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        details += [(key, given[key]) for key in ("root_rank", "tag") if key in given]
        details += [("reduction", self._reduction)] if "reduce_op" in given else []
        self.members[group.group_name] = members
        devices = frozenset(t.device.type for t in tensors)
        peer = None if peer is None else members[peer]
        self.calls.append(Call(group.group_name, MESSAGES.get(op, op), tuple(details), devices, peer))


class Record(NamedTuple):
    """One rank's calls; ``names`` says what each of its groups is for, ``members`` who is in it."""

    calls: list[Call]
    names: dict[str, str]
    members: dict[str, tuple[int, ...]]


def differences(records: list[Record]) -> list[str]:
    """Where the members of a communicator do not call the same."""
    found = []
    for group, members in _groups(records).items():
        first, *others = members
        own = {rank: [c for c in records[rank].calls if c.group == group] for rank in members}
        collectives = {rank: [c[:3] for c in calls if c.peer is None] for rank, calls in own.items()}
        found += [
            _difference(f"group {group}: ranks {first} and {other}", collectives[first], collectives[other])
            for other in others
        ]
        for sender in members:
            for receiver in members:
                sent = [c.details for c in own[sender] if (c.op, c.peer) == ("send", receiver)]
                into = [c.details for c in own[receiver] if (c.op, c.peer) == ("recv", sender)]
                found.append(_difference(f"group {group}: messages from {sender} to {receiver}", sent, into))
    return [text for text in found if text]


def _difference(what: str, mine: list[Any], theirs: list[Any]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    if len(mine) == len(theirs) == at:
        return ""
    return f"{what} differ at {at}: {mine[at : at + 1]} and {theirs[at : at + 1]}"


def cycle(records: list[Record]) -> list[Any]:
    """What waits for one another in a circle; empty where every order of turns ends."""
    graph: networkx.DiGraph = networkx.DiGraph()
    for rank, record in enumerate(records):
        counts: Counter[Any] = Counter()
        posted: dict[int, tuple[Any, ...]] = {}
        events: list[tuple[Any, ...]] = []
        for at, call in enumerate(record.calls):
            if call.op == "wait":
                side, *message = posted[call.details[0]]
                events.append(("wait", rank, at))
                graph.add_edge(("recv" if side == "send" else "send", *message), events[-1])
                continue
            ends = "all" if call.peer is None else (rank, call.peer) if call.op == "send" else (call.peer, rank)
            side = "all" if call.peer is None else call.op
            events.append((side, call.group, ends, counts[side, call.group, ends]))
            counts[side, call.group, ends] += 1
            posted[at] = events[-1]
        graph.add_edges_from(pairwise(events))
    try:
        return [edge[0] for edge in networkx.find_cycle(graph)]
    except networkx.NetworkXNoCycle:
        return []


def elsewhere(records: list[Record], device: str) -> list[str]:
    """Calls with a tensor that is not on ``device``; over the group named "host", with one not in host memory."""
    return [
        f"rank {rank}: {call.op} over {record.names.get(call.group, '?')} with a tensor on {sorted(call.devices)}"
        for rank, record in enumerate(records)
        for call in record.calls
        if call.devices - {"cpu" if record.names.get(call.group) == "host" else device}
    ]


def _groups(records: Iterable[Record]) -> dict[str, tuple[int, ...]]:
    """Members of every group; the name of one is never that of another."""
    found: dict[str, tuple[int, ...]] = {}
    for record in records:
        for group, members in record.members.items():
            assert found.setdefault(group, members) == members, f"group {group} has other members elsewhere"
    return found
