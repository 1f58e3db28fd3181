"""Counts of the global batch: placeholders for them, and the graph that counts one microbatch.

A count is a sum over batch tensors alone, such as ``mask.sum()``: known before the first forward, and over the global
batch simply the sum of the microbatches' counts. The mean of a batch tensor is such a sum over their number. A small
vector of sums, one of each column, is as many counts. A count may read others, as a variance reads a mean: it is taken
once these are known.

A mean cross-entropy of a microbatch is its share of the mean over all valid labels of the global batch; with class
weights the divisor is the sum of the weights of the valid labels. The labels that the loss skips are known: those that
a cross-entropy of the captured graph reads as ignored. Terms that are no sum over the batch, such as a product of two
means, are exact by sums over the global batch: values made of these sums are everywhere those of one process.

    cross_entropy(x, y, mean)   →   cross_entropy(x, y, sum) / Σ over the global batch of (y ≠ ignore_index)
    mean(a) · mean(b)   →   over_data(mean(a) / n) · over_data(mean(b) / n)     each microbatch has all of it, takes 1/n

With one microbatch for each dp rank ``over_data`` is a sum over ranks; with several in turn, forwards of their own
count the sums first (passes.ops.counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.canonical.products import NOTHING_IGNORED
from passes.partition.loss.kinds import LOOSE, MEAN, ROWS, SHARE, SUM, UNKNOWN, WHOLE, Kind, counts_inputs
from passes.program.builder import Builder, bare
from passes.program.ops.aten import arguments, aten, has_floats, is_random, named, packet_of
from passes.program.ops.groups import CROSS_ENTROPIES, LOOKUPS, MOVES, PLACING, is_grouped
from passes.program.ops.sequence import local_rows, over_data
from passes.program.program import Program
from passes.program.walks import ancestors, operands, walk
from passes.program.weights import is_weight

MOST_SUMS = 64  # elements of a count that is no scalar


@dataclass
class LossTerms:
    """``denominators``: placeholders of the counts, in order. ``counts``: the graph that counts one microbatch, of the
    batch tensors ``count_inputs`` and of all counts, in as many turns as there are ``levels`` of them. ``inexact``: ops
    that could not be made exact and are averaged over microbatches, and their places; ``added``: those that are added
    up. ``mixed``: ops before the loss that mix the sequences of a batch; ``unknown``: those that may. ``doubts``: ops
    of the loss with a number or a constant that may depend on the batch size, left unchanged. ``counted_first``: ops
    that read sums over the global batch while a rank runs ``in_turn`` microbatches: all forwards of a step run once
    more, to count them. ``adds_up``: the loss is a sum over sequences, over counts at most: of any number of
    microbatches it adds up."""

    denominators: list[str] = field(default_factory=list)
    counts: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    levels: int = 1
    inexact: list[tuple[str, Any]] = field(default_factory=list)
    added: list[tuple[str, Any]] = field(default_factory=list)
    mixed: list[tuple[str, Any]] = field(default_factory=list)
    unknown: list[tuple[str, Any]] = field(default_factory=list)
    doubts: list[tuple[str, Any]] = field(default_factory=list)
    counted_first: list[tuple[str, Any]] = field(default_factory=list)
    in_turn: int = 1
    adds_up: bool = False


class Counts:
    """Owns the counts found so far, in ``program``'s graph."""

    def __init__(self, program: Program, terms: LossTerms) -> None:
        self.terms = terms
        self.graph = program.graph.graph
        self.counted: list[fx.Node] = []

    def holder(self, count: fx.Node) -> fx.Node:
        """Return the placeholder (float64) that will hold Σ ``count`` over the global batch."""
        if count not in self.counted:
            self.counted.append(count)
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                holder = self.graph.placeholder(f"denominator_{len(self.counted) - 1}")
            holder.meta = {"val": torch.empty((), dtype=torch.float64, device="meta"), "grad": False}
            self.terms.denominators.append(holder.name)
        name = self.terms.denominators[self.counted.index(count)]
        return next(n for n in self.graph.nodes if n.name == name)

    def globalise(self, node: fx.Node, count: fx.Node) -> fx.Node:
        """Give every reader of ``node``, a microbatch's value, that of the global batch: the sum of ``count``."""
        readers, value = list(node.users), node.meta["val"]
        scalars = [count] if not value.dim() else self._elements(count)
        holders = [self.holder(scalar) for scalar in scalars]
        build = Builder(self.graph, node.next, holders[0])
        cast = build.call(aten.to.dtype, _joined(build, holders, value), value.dtype)
        cast.meta = {**node.meta, "val": cast.meta["val"], "grad": False}
        made = ancestors(scalars) - {node}
        for reader in readers:
            if reader not in made:
                reader.replace_input_with(node, cast)
        return cast

    def _elements(self, count: fx.Node) -> list[fx.Node]:
        """Return each element of a count that is no scalar."""
        output, size = self.graph.output_node(), count.meta["val"].numel()
        build = Builder(self.graph, output, output)
        flat = build.call(aten.reshape.default, count, [size], grad=False)
        cut = [build.call(aten.slice.Tensor, flat, 0, i, i + 1, grad=False) for i in range(size)]
        return [build.call(aten.reshape.default, x, [], grad=False) for x in cut]

    def finish(self) -> None:
        """Split off the graph of the counts: it reads batch tensors, constants and counts of lower levels alone."""
        if not self.counted:
            return
        needed, names = ancestors(self.counted), self.terms.denominators
        graph, env = fx.Graph(), {}
        for node in self.graph.nodes:
            if node in needed or node.name in names:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in self.counted))
        self.terms.counts = fx.GraphModule(torch.nn.Module(), graph)
        given = [n.name for n in self.graph.nodes if n in needed and n.op == "placeholder"]
        self.terms.count_inputs = tuple(name for name in given if name not in names)
        levels: dict[str, int] = {}
        for name, count in zip(names, self.counted, strict=True):
            levels[name] = 1 + max((levels[n.name] for n in ancestors([count]) if n.name in levels), default=0)
        self.terms.levels = max(levels.values())


def _joined(build: Builder, holders: list[fx.Node], value: torch.Tensor) -> fx.Node:
    """Return the holders of all elements in the shape of ``value``, in float64."""
    if not value.dim():
        return holders[0]
    rows = [build.call(aten.reshape.default, holder, [1]) for holder in holders]
    return build.call(aten.reshape.default, build.call(aten.cat.default, rows), list(value.shape))


def input_only(program: Program) -> dict[str, bool]:
    """Map each node that depends on batch tensors, buffers and constants alone to whether it reads a batch tensor.

    Random numbers are of one forward: a count would draw others.
    """
    found: dict[str, bool] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            if node.name not in program.parameters:
                found[node.name] = node.name in program.inputs
        elif node.op == "call_function" and not is_random(node) and all(n.name in found for n in node.all_input_nodes):
            found[node.name] = any(found[n.name] for n in node.all_input_nodes)
    return found


def places_rows(count: fx.Node) -> bool:
    """Return whether integers made of it say where rows of the microbatch stand, as the ends of each expert's rows: the
    counts of the global batch do not."""

    def is_read(node: fx.Node, value: fx.Node) -> bool:
        if is_grouped(node.target):
            return value in node.args[2:]
        given, table = named(node) if node.target in LOOKUPS | PLACING else {}, node.all_input_nodes[0]
        index = given.get("index", given.get("indices"))
        is_of_rows = table.op == "call_function" and not is_weight(table)
        return is_of_rows and value in (index if isinstance(index, list | tuple) else [index])

    def is_integer(node: fx.Node) -> bool:
        return node.op == "call_function" and not has_floats(node)

    made = walk([count], lambda n: n.users, into=is_integer)
    return any(user.op == "call_function" and is_read(user, n) for n in made for user in n.users)


NO_LABEL = -100  # PyTorch's default


class Together:
    """Owns the values summed over the ranks so far. ``share`` writes a value that adds up to the global one."""

    def __init__(self, kinds: Mapping[fx.Node, Kind], emit: Emit, share: Callable[[fx.Node], fx.Node]) -> None:
        self.kinds, self.emit, self.share = kinds, emit, share
        self.made: dict[fx.Node, fx.Node | None] = {}

    def whole(self, node: fx.Node) -> fx.Node | None:
        """Return ``node`` as one process has it on the global batch; None if it is made of single rows."""
        if node not in self.made:
            self.made[node] = self._whole(node)
        return self.made[node]

    def _whole(self, node: fx.Node) -> fx.Node | None:
        kind = self.kinds[node].name
        if kind == WHOLE:
            return node
        if kind in (SHARE, LOOSE):
            return self.emit(node, over_data, [self.share(node)]) if kind == SHARE else None
        if kind == UNKNOWN and self._counts_rows(node):
            return self.emit(node, over_data, [node])
        if kind == UNKNOWN and self._counts_its_labels(node):
            parts = (self.emit(part, over_data, [part]) for part in _sum_and_count(node, self.emit))
            return self.emit(node, aten.div.Tensor, list(parts))
        if kind != UNKNOWN or node.op != "call_function":
            return None
        given = {n: self.whole(n) for n in node.all_input_nodes}
        if None in given.values():
            return None
        args: Any = fx.map_arg(node.args, lambda n: given[n])
        return self.emit(node, node.target, list(args), dict(fx.map_arg(node.kwargs, lambda n: given[n])))

    def _counts_its_labels(self, node: fx.Node) -> bool:
        """A mean cross-entropy of rows with class ids that are computed: which of them count is not known before."""
        given = named(node) if node.target in CROSS_ENTROPIES else {}
        is_mean = bool(given) and given["reduction"] == MEAN and not given["target"].meta["val"].is_floating_point()
        return is_mean and all(self.kinds[given[name]].name == ROWS for name in ("self", "target"))

    def _counts_rows(self, node: fx.Node) -> bool:
        """Return whether it is a histogram of rows in bins that do not follow the rows: counts add up."""
        if packet_of(node.target) is not aten.histc or self.kinds[node.all_input_nodes[0]].name != ROWS:
            return False
        given = named(node)
        return given["min"] < given["max"]


Emit = Callable[..., fx.Node]  # a call with the meta values of another node


def counts_labels(node: fx.Node, program: Program) -> bool:
    """Return whether the number of valid labels of a cross-entropy follows from the batch alone."""
    return not arguments(node)["target"].meta["val"].is_floating_point() and counts_inputs(node, input_only(program))


def over_all_labels(node: fx.Node, counts: Counts, emit: Emit) -> fx.Node:
    """Return the share of a mean cross-entropy that counts its labels. ``counts``: of the global batch."""
    (total, count), dtype = _sum_and_count(node, emit), node.meta["val"].dtype
    whole = emit(node, aten.to.dtype, [counts.holder(count), dtype])
    whole.meta["val"], whole.meta["grad"] = torch.empty((), dtype=dtype, device="meta"), False
    return emit(node, aten.div.Tensor, [total, whole])


def _sum_and_count(node: fx.Node, emit: Emit) -> tuple[fx.Node, fx.Node]:
    """Return the sum over rows of a mean cross-entropy, and how much these rows count together."""
    given = arguments(node)
    target, weight = given["target"], given.get("weight")

    def call(op: Any, *args: Any) -> fx.Node:
        new = emit(target, op, list(args))
        values = fx.map_arg(args, lambda n: bare(n.meta["val"]))
        new.meta["val"], new.meta["grad"] = bare(op(*values)), False
        return new

    count = call(aten.sum.default, rows_that_count(call, target, weight, int(given.get("ignore_index", NO_LABEL))))
    order = [given["self"], target, weight, SUM, *(given[n] for n in ("ignore_index", "label_smoothing") if n in given)]
    if "label_smoothing" in given and "ignore_index" not in given:
        order.insert(4, NO_LABEL)
    return emit(node, node.target, order), count


def rows_that_count(
    call: Callable[..., fx.Node], target: fx.Node, weight: fx.Node | None, ignore_index: int
) -> fx.Node:
    """Return for each row whether its label counts in a mean, or its class weight. ``call(op, *args)`` adds a call."""
    valid = call(aten.ne.Scalar, target, ignore_index)
    if weight is None:
        return valid
    safe = call(aten.mul.Tensor, target, valid)
    return call(aten.mul.Tensor, call(aten.index.Tensor, weight, [safe]), valid)


def ignored_labels(program: Program) -> dict[str, int]:
    """Batch key → the value that the loss skips; without keys with values that are also ids of an embedding."""
    nodes = program.graph.graph.nodes
    found = {}
    for node in nodes:
        if packet_of(node.target) is aten.cross_entropy_loss:
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", NO_LABEL)
            labels = [n for n in sorted(ancestors([node.args[1]])) if n.name in program.inputs]
            found |= {program.inputs[n.name]: ignored for n in labels if ignored != NOTHING_IGNORED}
    read_as_ids = {program.inputs[n.name] for n in _looked_up(nodes) if n.name in program.inputs}
    return {name: ignored for name, ignored in found.items() if name not in read_as_ids}


def _looked_up(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Return inputs with values that are used directly as ids of an embedding, also shifted by one: an ignored label
    would be no row of it.

    ``where`` and ``masked_fill`` end the search: they replace an ignored id by another.
    """
    ids = [node.args[1] for node in nodes if packet_of(node.target) is aten.embedding]
    start = [value for value in ids if isinstance(value, fx.Node)]
    return walk(start, operands, stop=lambda node: node.target not in MOVES | PLACING and node.target is not local_rows)
