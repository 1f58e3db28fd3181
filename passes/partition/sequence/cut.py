"""cut_sequence(program, cp): the program over all tokens becomes that of one rank of cp, over its tokens.

The mean of a loss over rows that are cut: a rank's sum, over the number of all rows that count.

    cross_entropy(x, labels)   →   cross_entropy(x, labels, reduction="sum") / sum(labels ≠ ignored)

As many rows count as in the whole target, which each rank has. Of targets that are probabilities every row counts:
that mean is 1/cp of a rank's (``Form.MEAN``).

repeat_rows(program): rows that are picked by a constant 0, 0, 1, 1, … are each repeated.

    x[arange(n).repeat_interleave(k)]   →   x.reshape(n, 1, …).expand(n, k, …).reshape(n · k, …)

An index reads all rows; of a repetition every rank of cp computes that of its own.

A loss over all but the first or last tokens becomes one over all tokens, in which the others do not count.

    x[:, :-1] ... cross_entropy(x, labels[:, 1:])   →   x ... cross_entropy(x, [labels[:, 1:], ignored])
    x[:, :-1] ... sum(x · mask[:, 1:])              →   x ... sum(where(kept, x · [mask[:, 1:], 0], 0))
    cat([x[:, :-1], embed(ids[:, 1:])], -1) ...     →   cat([x, embed([ids[:, 1:], 0])], -1) ...

So a sharded sequence keeps its length: rows of tokens that are left out are computed like the others, and end in the
reduction. The ops from the slice to there must work row by row, or attend causally where the last tokens are left out;
otherwise the slice stays, and is refused later.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import Where
from passes.moe.layers import Experts
from passes.partition.loss.counts import rows_that_count
from passes.partition.loss.kinds import MEAN, SUM
from passes.partition.loss.scored import is_integer
from passes.partition.sequence.facts import Context, Types, op
from passes.partition.sequence.partition import partition
from passes.partition.sequence.rules import options_over_cp
from passes.partition.sequence.sorted_rows import sort_plainly
from passes.partition.sequence.types import decide_types
from passes.partition.typings.base import Form, Option, Site
from passes.program.builder import Builder, erase_unread
from passes.program.known_values import value_of
from passes.program.ops.aten import aten, is_pointwise, named, packet_of, reduced_dims, shape_of, value_bytes
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.weights import is_weight
from passes.types.types import I, P, Placement, V

ROW_BY_ROW = {Form.PARTS, Form.SIZES, Form.COLUMN, Form.SPLIT}


def cut_sequence(program: Program, cp: int, experts: Experts) -> Context:
    """Rewrite ``program`` in place; returns the facts of the sharding. Inputs stay full: ranks take their tokens of
    them.

    Raises PlanError if there is no sequence, if one does not divide by 2·cp, and for products that mix its tokens.
    """
    if cp == 1:
        return Context()
    _tell_operands_apart(program.graph.graph)
    repeat_rows(program.graph.graph)
    lengthen(program.graph.graph, cp)
    _loss_is(program)
    types = decide_types(program, cp, sort_plainly(program, experts))
    program.rewrites += _computed_in_full(program, types)
    count_rows(program.graph.graph, types)
    _loss_is(program)
    program.graph.graph = partition(program.graph.graph, types, program.node(program.loss))
    _loss_is(program)
    return Context(cp, tuple(sorted(types.lengths)))


def _computed_in_full(program: Program, types: Types) -> Iterator[tuple[str, Where]]:
    """Yield the ops that are no less work for a rank of cp, with their lines."""
    for node, size in types.undivided:
        rest = f"every rank of cp computes {op(node)} in full, {value_bytes(node):,} bytes"
        yield f"a sequence of {size} is not divisible by 2·cp = {types.chunks}: {rest}", where_of(node)
    for node in types.begun:
        what = f"cp shards a sequence from {op(node)} on; every rank of cp computes what leads to it in full"
        yield what, where_of(node)
    for node in program.graph.graph.nodes:
        if node in types.recut:
            yield f"every rank of cp computes {op(node)} for all tokens", where_of(node)


def _loss_is(program: Program) -> None:
    """Set the program's loss to the graph's result."""
    (loss,) = program.graph.graph.output_node().args[0]  # pyright: ignore
    program.loss = loss.name  # pyright: ignore


def _tell_operands_apart(graph: fx.Graph) -> None:
    """Make two values of queries that are their own keys: one stays cut, the other is gathered."""
    for node in list(graph.nodes):
        if node.op != "call_function" or is_pointwise(node.target):
            continue
        for position in range(1, len(node.args)):
            value = node.args[position]
            if isinstance(value, fx.Node) and value in node.args[:position]:
                same = Builder(graph, node, value).call(aten.reshape.default, value, list(shape_of(value)))
                node.update_arg(position, same)


# ---- the mean of a loss over rows that are cut: a rank's sum, over the number of all rows that count


def count_rows(graph: fx.Graph, types: Types) -> None:
    """Rewrite ``graph``, and type what is new."""
    for node in list(graph.nodes):
        option = types.options.get(node) if node.target in CROSS_ENTROPIES else None
        given: dict[str, Any] = named(node) if option is not None and option.form is Form.SUM else {}
        if option is None or given.get("reduction") != MEAN:
            continue
        build = Builder(graph, node, node)
        names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
        total = build.call(node.target, *({**given, "reduction": SUM}[name] for name in names))
        counted = rows_that_count(build.call, given["target"], given["weight"], given["ignore_index"])
        mean = build.call(aten.div.Tensor, total, build.call(aten.sum.default, counted, grad=False))
        types.options |= {total: option, mean: Option((P, I), P, Form.PARTIAL)}
        types.natives |= {total: P, mean: P}
        node.replace_all_uses_with(mean)


# ---- repeat_rows(program): rows that are picked by a constant 0, 0, 1, 1, … are each repeated


def repeat_rows(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    for node, rows, times in list(_repetitions(graph)):
        node.replace_all_uses_with(Builder(graph, node, node).repeated(rows, 0, times))
        graph.erase_node(node)


def _repetitions(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Calls, with the value that has the rows, and how often each is repeated."""
    known: dict[fx.Node, Tensor | None] = {}
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        rows, (index, *more) = node.args
        if more or not isinstance(index, fx.Node) or not isinstance(rows, fx.Node) or is_weight(rows):
            continue
        size, count = shape_of(rows)[0], index.meta["val"].numel()
        if index.meta["val"].dim() != 1 or count % size or not rows.meta.get("grad"):
            continue
        if index not in known:
            known[index] = value_of(index, graph, {})
        value, times = known[index], count // size
        if value is not None and torch.equal(value, torch.arange(count) // times):
            yield node, rows, times


# ---- a loss over all but the first or last tokens


def lengthen(graph: fx.Graph, cp: int) -> None:
    """Rewrite each slice of activations that leaves out a few tokens of a sequence that cp could cut."""
    for node in list(graph.nodes):
        if _drops_few(node, cp) and (steps := _steps(graph, node)) is not None:
            _Longer(graph, node, steps).write()


def _drops_few(node: fx.Node, cp: int) -> bool:
    if node.op != "call_function" or node.target is not aten.slice.Tensor or not node.meta["grad"]:
        return False
    value, dim, start, end, *step = node.args
    size, kept = shape_of(value)[dim], end - start  # pyright: ignore
    return not step and size % (2 * cp) == 0 and size // 2 < kept < size


def _steps(graph: fx.Graph, start: fx.Node) -> dict[fx.Node, Option] | None:
    """The ops after ``start``, each with its typing if rows were sharded; None if one does not work row by row."""
    dim: Any = start.args[1]
    cuts, are_last = {start: V(dim, shape_of(start)[dim])}, start.args[2] == 0
    steps: dict[fx.Node, Option] = {}
    for node in graph.nodes:
        if not any(n in cuts for n in node.all_input_nodes):
            continue
        draws = "draw" in node.meta  # a number of its own for each element of fewer rows
        option = None if draws or node.op != "call_function" else _row_by_row(node, cuts, are_last=bool(are_last))
        if option is None or not set(option.out.sizes) <= {shape_of(start)[dim]}:
            return None
        steps[node] = option
        if option.out.is_sharded:
            cuts[node] = option.out
    return steps


def _row_by_row(node: fx.Node, cuts: Mapping[fx.Node, Placement], *, are_last: bool) -> Option | None:
    """``are_last``: whether no row comes after those that are left out: then no other attends to them causally."""
    if are_last and node.target is aten.scaled_dot_product_attention.default and named(node)["is_causal"]:
        rows = [cuts.get(n) for n in node.all_input_nodes]
        at = V(len(shape_of(node)) - 2, shape_of(node)[-2])
        return Option((at,) * len(rows), at, Form.PARTS) if {*rows} == {at} else None
    site = Site(node, 1, {n.name: {cuts[n]} for n in node.all_input_nodes if n in cuts})
    for option in options_over_cp(site):
        fits = all(t == cuts[n] for n, t in zip(site.inputs, option.args, strict=True) if n in cuts)
        is_row = option.out.is_sharded and option.form in ROW_BY_ROW
        if fits and (is_row or (option.out == P and _reduces(node))):
            return option
    return None


def _reduces(node: fx.Node) -> bool:
    """Return whether a sum over rows can leave some out."""
    if node.target in CROSS_ENTROPIES:
        return not named(node)["target"].meta["val"].is_floating_point()
    return packet_of(node.target) in (aten.sum, aten.mean)


def _of_ids(value: fx.Node, cut: Placement) -> Option | None:
    """Return how a value is made row by row of integers alone, beside weights: for any integers it is regular."""
    if not value.meta.get("grad") or "draw" in value.meta:
        return None
    site = Site(value, 1, {value.name: {cut}} | {n.name: {V(cut.dim, *cut.sizes)} for n in value.all_input_nodes})
    for option in options_over_cp(site):
        if option.out == cut and option.form in ROW_BY_ROW:
            rows = [(n, t) for n, t in zip(site.inputs, option.args, strict=True) if t.is_sharded]
            if all(is_integer(n) or _of_ids(n, t) is not None for n, t in rows):
                return option
    return None


class _Longer:
    """Owns the longer value of each step."""

    def __init__(self, graph: fx.Graph, start: fx.Node, steps: Mapping[fx.Node, Option]) -> None:
        value, dim, first, end = start.args
        self.graph, self.start, self.steps = graph, start, steps
        self.size: int = shape_of(value)[dim]  # pyright: ignore
        self.before, self.after = int(first), self.size - int(end)  # pyright: ignore
        self.long: dict[fx.Node, Any] = {start: value}

    def write(self) -> None:
        for node, option in self.steps.items():
            build = Builder(self.graph, node, node)
            given = dict(zip(node.all_input_nodes, option.args, strict=True))
            if option.out.is_sharded:
                self.long[node] = self._row_by_row(build, node, option, given)
            else:
                node.replace_all_uses_with(self._reduced(build, node, given))
        erase_unread(self.graph, [n for n in reversed(list(self.steps)) if not n.users])

    def _row_by_row(self, build: Builder, node: fx.Node, option: Option, given: Mapping[fx.Node, Placement]) -> fx.Node:
        args, kwargs = self._operands(build, node, given)
        if option.form is Form.SIZES:
            args[1] = self._longer_shape(shape_of(node), option.out)
        return build.call(node.target, *args, **kwargs)

    def _operands(self, build: Builder, node: fx.Node, given: Mapping[fx.Node, Placement]) -> tuple[list[Any], Any]:
        def longer(n: fx.Node) -> fx.Node:
            if n in self.long:
                return self.long[n]
            if not given[n].is_sharded:
                return n
            option = _of_ids(n, given[n])
            if option is None:
                return self._padded(build, n, given[n], _filling(node, n))
            return self._row_by_row(build, n, option, dict(zip(n.all_input_nodes, option.args, strict=True)))

        args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), longer)
        return list(args), kwargs

    def _longer_shape(self, shape: tuple[int, ...], cut: Placement) -> list[int]:
        return [len(cut.segments) * self.size if d == cut.dim else n for d, n in enumerate(shape)]

    def _padded(self, build: Builder, value: fx.Node, cut: Placement, filling: float) -> fx.Node:
        """Return an operand beside the rows, padded for the rows that were left out."""
        shape, count, dim = shape_of(value), len(cut.segments), cut.dim
        apart = [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]
        rows = build.call(aten.reshape.default, value, apart) if count > 1 else value
        last = len(shape_of(rows)) - 1 - (dim + (count > 1))
        rows = build.call(aten.pad.default, rows, [0, 0] * last + [self.before, self.after], "constant", filling)
        return build.call(aten.reshape.default, rows, self._longer_shape(shape, cut)) if count > 1 else rows

    # ---- the end of the rows

    def _reduced(self, build: Builder, node: fx.Node, given: Mapping[fx.Node, Placement]) -> fx.Node:
        args, kwargs = self._operands(build, node, given)
        if node.target in CROSS_ENTROPIES:
            return build.call(node.target, *args, **kwargs)
        for i, argument in enumerate(args):
            original = node.args[i]
            if isinstance(original, fx.Node) and given[original].is_sharded:
                args[i] = self._masked(build, argument, given[original])
        if packet_of(node.target) is not aten.mean:
            return build.call(node.target, *args, **kwargs)
        op = aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
        shape = shape_of(node.all_input_nodes[0])
        return build.call(aten.div.Tensor, build.call(op, *args, **kwargs), prod(shape[d] for d in reduced_dims(node)))

    def _masked(self, build: Builder, rows: fx.Node, cut: Placement) -> fx.Node:
        """Set to zero the rows that are left out."""
        count, shape = len(cut.segments), shape_of(rows)
        places = build.call(aten.arange.default, self.size, device=torch.device("cpu"))
        kept = build.call(aten.ge.Scalar, places, self.before)
        if self.after:
            last = build.call(aten.lt.Scalar, places, self.size - self.after)
            kept = build.call(aten.__and__.Tensor, kept, last)
        if count > 1:
            kept = build.call(aten.expand.default, kept, [count, self.size])
        wide = [shape[cut.dim] if d == cut.dim else 1 for d in range(len(shape))]
        kept = build.call(aten.reshape.default, kept, wide)
        return build.call(aten.where.ScalarOther, kept, rows, 0)


def _filling(reader: fx.Node, value: fx.Node) -> float:
    """Return a neutral filling: an ignored label; 1 for a divisor; else 0."""
    if reader.target in CROSS_ENTROPIES:
        return float(named(reader)["ignore_index"])
    return 1.0 if reader.target is aten.div.Tensor and value is reader.args[1] else 0.0
