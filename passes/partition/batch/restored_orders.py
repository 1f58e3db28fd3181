"""Rows that a model sorts by expert, computes one by one, and brings back in order: a sort that mixes no sequences.

    order   sort(ids)[1], argsort(ids)      rows     x[order // k], w[order]: of tokens or of pairs, in the order
            order // k, (0 … n − 1 // k)[order]      bias[keys], and calls that act row by row
    keys    sort(ids)[0]                             grouped(rows, W, ends): each row by the matrix of its expert
    counts  histc(keys or ids, E, 0, E)     back     y[places], zeros.index_add(0, order // k, y), empty[order] = y
            one_hot(ids, E).sum(0)          places   empty[order] = 0 … n − 1, argsort(order)
            cat((ids == e).sum() …)         ends     cumsum(counts)

Each pair of token and choice gets what it would get alone, wherever ``ids`` hold the batch: one sequence shows it too.
Shown call by call: an order with another reader, such as a limit on the rows of an expert, is none of these.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.program.known_values import value_of
from passes.program.ops.aten import aten, draws, named, packet_of, reduced_dims, shape_of
from passes.program.ops.groups import BEST, FILLED, JOINS, RESHAPES, SAME, SORTS, WITH_SIZES, is_grouped
from passes.rules.follow import follow
from passes.types.types import Run

ROWS = ("rows", "keys")
EXACT = (torch.int64, torch.int32, torch.float64, torch.float32)  # dtypes that hold counts and numbers of experts


class _MixesRowsError(Exception):
    """A reader of the order is not understood, or computes one row of others."""


@dataclass(frozen=True)
class RestoredOrder:
    """A sort of ``ids`` [n]. ``inside``: values in its order → their dim of rows, or None without one.

    ``back``: values that are in the order of ``ids`` again; ``beside``: values from outside that are taken to be in it.
    Of both: how many of the n rows in turn belong to one of theirs.
    """

    ids: fx.Node
    inside: dict[fx.Node, int | None]
    back: dict[fx.Node, int]
    beside: dict[fx.Node, int]

    def runs(self, flow: Mapping[fx.Node, frozenset[Run] | None], node: fx.Node) -> frozenset[Run] | None:
        """The dims of ``node`` with the batch; None if not known, or if values beside have another order of it."""
        if node in self.inside:
            dim = self.inside[node]
            return frozenset(() if dim is None else {(dim, 1, shape_of(self.ids)[0])})
        is_like_ids = all(flow[x] == self._of_ids(flow, times) for x, times in self.beside.items())
        return self._of_ids(flow, self.back[node]) if is_like_ids else None

    def _of_ids(self, flow: Mapping[fx.Node, frozenset[Run] | None], times: int) -> frozenset[Run] | None:
        """Return the same of a value with one row for ``times`` rows in turn."""
        of_ids = flow[self.ids] or ()
        found = frozenset((0, distance // times, count) for _, distance, count in of_ids if distance % times == 0)
        return found if found and len(found) == len(of_ids) else None


def restored_orders(graph: fx.Graph, on_batch: Collection[fx.Node]) -> list[RestoredOrder]:
    """Return all such sorts of ``graph``. ``on_batch``: the nodes that are computed from values of the batch."""
    found, sorts = [], [node for node in graph.nodes if node.target in SORTS]
    products = [node for node in graph.nodes if sorts and is_grouped(node.target)]
    counts = [_counting(ends) for ends in dict.fromkeys(n for node in products for n in node.all_input_nodes[2:3])]
    for sort in sorts:
        ids = sort.all_input_nodes[0]
        size = _number_of_experts(ids) if len(shape_of(ids)) == 1 and not named(sort)["descending"] else 0
        with suppress(_MixesRowsError):
            found += [_Order(sort, size, counts, on_batch).read()] if size else []
    return found


def _number_of_experts(ids: fx.Node) -> int:
    """Return E, if ``ids`` are among 0 … E − 1: the places of the best along a dim of E, joined ones too, or of
    elements that are picked along one, as PyTorch refuses others there. 0 if they are not shown to be."""
    ids = _source(ids)
    if ids.target in JOINS:
        joined = {_number_of_experts(part) for part in ids.all_input_nodes}
        return joined.pop() if len(joined) == 1 else 0
    call: Any = ids.args[0] if ids.target is getitem and ids.args[1] == 1 else ids
    calls = [call] if call.target in BEST else []
    calls += [user for user in ids.users if packet_of(user.target) is aten.gather and named(user)["index"] is ids]
    sizes = {shape_of(named(call)["self"])[dim] for call in calls if isinstance(dim := named(call).get("dim"), int)}
    return sizes.pop() if len(sizes) == 1 else 0


def _source(ids: fx.Node) -> fx.Node:
    """Return the first node that holds the same numbers in the same order."""
    while ids.target in RESHAPES | SAME and ids.meta["val"].dtype in EXACT:
        ids = ids.all_input_nodes[0]
    return ids


Counts = tuple[fx.Node, dict[fx.Node, str]]


def _counting(ends: fx.Node) -> Counts:
    """The value of which ``ends`` count the numbers, and the roles of the calls that do; no calls if not known."""
    counts = ends
    while packet_of(counts.target) in (aten.cumsum, aten.to):
        counts = counts.all_input_nodes[0]
    read, packet = counts.all_input_nodes, packet_of(counts.target)
    if counts.meta["val"].dtype not in EXACT:
        return counts, {}
    if packet is aten.histc:
        given = named(counts)
        is_each = given["min"] == 0 and given["max"] in (given["bins"], given["bins"] - 1)
        return read[0], {counts: "counts"} if is_each else {}
    if packet is aten.sum and packet_of(read[0].target) is aten.one_hot and not named(counts).get("keepdim"):
        is_of_all = reduced_dims(counts) == {*range(len(shape_of(read[0])) - 1)}
        return read[0].all_input_nodes[0], {counts: "counts"} if is_of_all else {}
    sums = [n.all_input_nodes[0] for n in read if n.target in RESHAPES]
    equal = [n.all_input_nodes[0] for n in sums if packet_of(n.target) is aten.sum]
    compared = [n for n in equal if n.target is aten.eq.Scalar]
    ids = compared[0].all_input_nodes[0] if compared else counts
    is_one_each = packet is aten.cat and shape_of(counts) == (len(read),)
    is_of_each = is_one_each and [n.args for n in compared] == [(ids, number) for number in range(len(read))]
    return ids, dict.fromkeys((*read, *sums), "count") | {counts: "counts"} if is_of_each else {}


class _Order:
    """Owns the ``roles`` of the values that follow from one sort; of an order // k also k (``times``)."""

    def __init__(self, sort: fx.Node, size: int, counts: Iterable[Counts], on_batch: Collection[fx.Node]) -> None:
        self.size, self.on_batch, self.ids = size, on_batch, sort.all_input_nodes[0]
        self.num_rows = shape_of(self.ids)[0]
        self.roles, self.times = {sort: "sort"}, dict[fx.Node, int]()
        if packet_of(sort.target) is aten.argsort:
            self.roles[sort], self.times[sort] = "order", 1
        keys = (n for n in sort.users if n.target is getitem and n.args[1] == 0)
        counted = {_source(self.ids), *keys}
        for ids, roles in counts:
            self.roles |= roles if _source(ids) in counted else {}
        self.back, self.beside = dict[fx.Node, int](), dict[fx.Node, int]()

    def read(self) -> RestoredOrder:
        """Follow the order through its readers. Raises _MixesRowsError."""
        for node in self._readers():
            is_call = node.op == "call_function" and not draws(node.target)
            role = self.roles.get(node) or (self._role(node) if is_call else "")
            if not role:
                raise _MixesRowsError
            if role != "back":
                self.roles[node] = role
        rows = [node for node, role in self.roles.items() if role in ROWS]
        start = {n: 0 for n in rows if not any(self.roles.get(x) in ROWS for x in n.all_input_nodes)}
        dims = follow(start, {*rows}.difference(start), lambda node, why: _MixesRowsError(), "", every=True)
        if not dims.keys() <= {*rows}:
            raise _MixesRowsError  # a value for each place in the order
        return RestoredOrder(self.ids, {node: dims.get(node) for node in self.roles}, self.back, self.beside)

    def _readers(self) -> Iterator[fx.Node]:
        """Yield each reader of a value with a role, in the graph's order."""
        seen = {user for node in self.roles for user in node.users}
        work = sorted(seen)
        while work:
            yield (node := heapq.heappop(work))
            for user in node.users if node in self.roles else ():
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(work, user)

    def _role(self, node: fx.Node) -> str:
        """Return "" if it has none."""
        read = {self.roles[n] for n in node.all_input_nodes if n in self.roles}
        packet, args, given = packet_of(node.target), node.args, named(node)
        if node.target is getitem and read == {"sort"}:
            self.times |= {node: 1} if args[1] == 1 else {}
            return "order" if args[1] == 1 else "keys"
        if packet is aten.to and len(read) == 1 and read <= {"keys", "counts", "ends"}:
            return read.pop() if node.meta["val"].dtype in EXACT else ""
        if packet is aten.floor_divide and read == {"order"}:
            return self._token(node, *args)
        if packet is aten.cumsum and read == {"counts"}:
            return "ends"
        if node.target in FILLED and read <= {"order", "rows"}:
            return "filled"
        if packet is aten.argsort and read == {"order"} and len(shape_of(node)) == 1 and not given["descending"]:
            return "places" if self.times[node.all_input_nodes[0]] == 1 else ""
        if packet is aten.index_put:
            return self._put(node, *args)
        if packet is aten.index and len(given["indices"]) == 1:
            return self._picked(node, given["self"], given["indices"][0])
        if node.target in WITH_SIZES and read == {"order"}:
            return self._repeated(node, node.all_input_nodes[0])
        if packet is aten.gather and given["dim"] == 0:
            return self._picked(node, given["self"], given["index"])
        if packet is aten.scatter_add or (packet is aten.index_add and given["alpha"] == 1):
            return self._added(node, *args[:4])
        if is_grouped(node.target):
            return self._multiplied(*args)
        # of rows alone, beside weights and numbers
        return "rows" if all(self.roles.get(n) in ROWS or n not in self.on_batch for n in node.all_input_nodes) else ""

    def _token(self, node: fx.Node, order: Any, k: Any) -> str:
        if not isinstance(k, int) or k < 1 or self.num_rows % k or self.times[order] > 1:
            return ""
        self.times[node] = k
        return "order"

    def _named(self, node: fx.Node, tokens: fx.Node) -> str:
        """Recognise (0 … n − 1 // k)[order], of numbers that are known."""
        numbers = value_of(tokens, tokens.graph.owning_module, {})
        if numbers is None or numbers.dtype not in (torch.int64, torch.int32) or not 0 <= numbers[-1] < self.num_rows:
            return ""
        self.times[node] = self.num_rows // (int(numbers[-1]) + 1)
        return "order" if torch.equal(numbers.long(), torch.arange(self.num_rows) // self.times[node]) else ""

    def _repeated(self, node: fx.Node, source: fx.Node) -> str:
        """Recognise the order [n, 1], or [n, d]: once for each feature of a row, as gather and scatter_add read it."""
        self.times[node], rows, shape = self.times[source], self.num_rows, shape_of(node)
        return "order" if shape == (rows, 1) or (shape_of(source) == (rows, 1) and shape[:-1] == (rows,)) else ""

    def _put(self, node: fx.Node, base: Any, indices: Any, value: Any, accumulates: Any = False) -> str:
        """Recognise rows back, or the place of each pair in the order; nothing of ``base`` is left."""
        is_order = [self.times.get(index) for index in indices] == [1] and len(shape_of(indices[0])) == 1
        if not is_order or accumulates or shape_of(base) != shape_of(value):
            return ""
        if self.roles.get(value) == "rows":
            self.back[node] = 1
            return "back"
        return "places" if packet_of(value.target) is aten.arange and value.args == (self.num_rows,) else ""

    def _picked(self, node: fx.Node, x: fx.Node, index: fx.Node) -> str:
        """Recognise rows in the order, or back."""
        role, is_outside = self.roles.get(index), x not in self.roles
        if role == "places" and self.roles.get(x) == "rows":
            self.back[node] = 1
            return "back"
        if role == "order" and is_outside and shape_of(x)[0] * self.times[index] == self.num_rows:
            if len(shape_of(x)) == self.times[index] == 1 and x not in self.on_batch:
                return self._named(node, x)
            self.beside[x] = self.times[index]
            return "rows" if x in self.on_batch else ""  # else it may hold the place of a row in the batch
        return "rows" if role in ROWS and is_outside and x not in self.on_batch else ""

    def _added(self, node: fx.Node, base: Any, dim: Any, index: Any, rows: Any) -> str:
        """Recognise rows back, summed over the rows of each token."""
        is_of_rows = self.roles.get(index) == "order" and self.roles.get(rows) == "rows" and dim == 0
        if not is_of_rows or base in self.roles or shape_of(base)[0] * self.times[index] != self.num_rows:
            return ""
        self.back[node] = self.times[index]
        self.beside |= {base: self.times[index]} if base in self.on_batch else {}
        return "back"

    def _multiplied(self, rows: Any, weight: Any, ends: Any = None, *more: Any) -> str:
        known = self.roles.get(rows), self.roles.get(ends)
        return "rows" if known == ("rows", "ends") and weight not in self.on_batch and not more else ""
