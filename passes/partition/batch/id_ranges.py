"""The integers that a batch may hold: ids that the graph looks up, and classes of its labels.

    embedding(W[n, h], ids)                        0 ≤ id < n
    cross_entropy(logits[.., c], labels, skipped)  0 ≤ label < c, or skipped
    index_select, gather of n along a dim          0 ≤ i < n            x[ids]    -n ≤ i < n
    one_hot(ids, n)                                0 ≤ id < n

Followed from each integer input through ops that only move its values. Values that a slice drops may be anything, so
the part of a sequence that is looked up is known exactly; if it is not, and after any arithmetic, there is no range: a
value outside of a range fails in the unmodified model too.

Rows that a forward looks up by numbers of its own, such as positions, must be there too: ``wpe[n, h](arange(length))``
needs length ≤ n. No batch holds these numbers, so no check of a batch finds them, and the shapes alone are fine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from passes.errors import PlanError
from passes.partition.loss.scored import is_integer
from passes.program.known_values import value_of
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import CASTS, CROSS_ENTROPIES, JOINS, MOVES, RESHAPES, SAME
from passes.program.ops.sequence import local_rows
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class IdRange:
    """``low`` ≤ value < ``high``, or ``skipped``, in ``part`` (half-open spans of the dims of one sequence).

    ``what`` names the reader for the user, ``unit`` the kind of ids.
    """

    low: int
    high: int
    skipped: int | None
    part: tuple[Span, ...]
    what: str
    unit: str


@dataclass(frozen=True, slots=True)
class _Trace:
    """A value that holds ``region`` of the input ``key``, all of it and nothing else of it.

    ``shift``: the value at index i is the input's at i + shift, while the dims are the input's; later None.
    """

    key: str
    region: tuple[Span, ...]
    shift: tuple[int, ...] | None


def id_ranges(program: Program) -> dict[str, tuple[IdRange, ...]]:
    """Batch key → the ranges of its values; keys without a certain range are left out."""
    traces: dict[fx.Node, list[_Trace]] = {}
    found: dict[str, dict[IdRange, None]] = {}
    for node in program.graph.graph.nodes:
        if node.name in program.inputs and is_integer(node):
            shape = shape_of(node)
            traces[node] = [_Trace(program.inputs[node.name], tuple((0, n) for n in shape), (0,) * len(shape))]
        elif node.op == "call_function" and any(traces.get(n) for n in node.all_input_nodes):
            for ids, ask in _lookups(node, program):
                for trace in traces.get(ids, ()):
                    found.setdefault(trace.key, {})[replace(ask, part=trace.region[1:])] = None
            traces[node] = list(_moved(node, traces))
            if node.target is local_rows:  # of all ranks together
                traces[node] = [replace(trace, shift=None) for trace in traces.get(node.all_input_nodes[0], ())]
    return {key: tuple(ranges) for key, ranges in found.items()}


def check_fixed_lookups(program: Program) -> None:
    """Raise PlanError if a constant id exceeds the rows of an embedding, for every batch."""
    for node in program.graph.graph.nodes:
        if packet_of(node.target) is not aten.embedding:
            continue
        given = named(node)
        num_rows = shape_of(given["weight"])[0]
        with torch.no_grad():
            asked = value_of(given["indices"], program.graph, {})
        if asked is not None and asked.numel() and int(asked.max()) >= num_rows:
            raise PlanError(
                f"the embedding {_held(given['weight'], program)} has {num_rows} rows, but the model looks up row "
                f"{int(asked.max())}: a sequence is longer than the positions of the model",
                where=where_of(node),
                fix=f"give the inputs of the spec a length of at most {num_rows}, or the model more positions",
            )


# ---- lookups


def _lookups(node: fx.Node, program: Program) -> Iterator[tuple[fx.Node, IdRange]]:
    """The ids that a call reads, and their range."""
    given, op = named(node), packet_of(node.target)
    if op is aten.embedding:
        yield given["indices"], _range(shape_of(given["weight"])[0], f"the embedding {_held(given['weight'], program)}")
    elif op in (aten.index_select, aten.gather):
        shape = shape_of(given["self"])
        ask = _range(shape[given["dim"]] if shape else 1, f"the input of {op.__name__}", unit="places")
        yield given["index"], ask
    elif op is aten.one_hot and (size := given.get("num_classes", -1)) > 0:
        yield given["self"], _range(size, "one_hot", unit="classes")
    elif op is aten.index:
        for dim, index in enumerate(given["indices"]):
            if isinstance(index, fx.Node) and all(is_integer(i) for i in given["indices"] if i is not None):
                size = shape_of(given["self"])[dim]
                yield index, replace(_range(size, "the indexed tensor", unit="places"), low=-size)
    elif node.target in CROSS_ENTROPIES and is_integer(given["target"]):
        shape = shape_of(given["self"])
        ignored = given.get("ignore_index", -100)
        skipped = ignored if ignored > _NO_LABEL else None
        ask = _range(shape[1 if len(shape) > 1 else 0], "the cross entropy", unit="classes")
        yield given["target"], replace(ask, skipped=skipped)


_NO_LABEL = -(1 << 32)  # below it is no number that a user would write


def _range(size: int, what: str, unit: str = "rows") -> IdRange:
    return IdRange(0, size, None, (), what, unit)


def _held(weight: fx.Node, program: Program) -> str:
    names = (program.parameters[n.name] for n in walk([weight], operands) if n.name in program.parameters)
    return next(names, "of no parameter").removesuffix(".weight")


# ---- ops that keep values


def _moved(node: fx.Node, traces: Mapping[fx.Node, Iterable[_Trace]]) -> Iterator[_Trace]:
    """The inputs with unchanged values in the result."""
    if node.target not in MOVES or not isinstance(node.meta.get("val"), torch.Tensor):
        return
    given = named(node)
    sources = given["tensors"] if node.target in JOINS else [given["src" if "src" in given else "self"]]
    for source in sources:
        for trace in traces.get(source, ()):
            moved = _step(node, given, source, trace)
            if moved is not None and all(start < stop for start, stop in moved.region):
                yield moved


def _step(node: fx.Node, given: dict[str, Any], source: fx.Node, trace: _Trace) -> _Trace | None:
    before, after, op = shape_of(source), shape_of(node), packet_of(node.target)
    if node.target in CASTS:
        return trace if is_integer(node) and _is_wide(node, source) else None
    if op is aten.slice:
        start = 0 if given["start"] is None else int(given["start"])
        start = min(max(start + before[given["dim"]] if start < 0 else start, 0), before[given["dim"]])
        return _cut(trace, before, after, {given["dim"] % len(before): start}) if given["step"] == 1 else None
    if op in (aten.pad, aten.constant_pad_nd):
        pads = list(given["pad"])
        lefts = {len(before) - 1 - i // 2: -int(pads[i]) for i in range(0, len(pads), 2)}
        return _cut(trace, before, after, lefts)
    if before == after and (node.target in SAME or node.target in RESHAPES or node.target in JOINS):
        return trace
    return replace(trace, shift=None) if prod(after) >= prod(before) else None


def _cut(trace: _Trace, before: tuple[int, ...], after: tuple[int, ...], starts: dict[int, int]) -> _Trace | None:
    """The window that begins at ``starts`` (by dim, else 0) and is ``after`` large; it may reach beyond the value."""
    whole = all(starts.get(d, 0) <= 0 and starts.get(d, 0) + after[d] >= before[d] for d in range(len(before)))
    if trace.shift is None:
        return trace if whole else None
    shift = tuple(s + starts.get(d, 0) for d, s in enumerate(trace.shift))
    region = tuple(
        (max(start, s), min(stop, s + n)) for (start, stop), s, n in zip(trace.region, shift, after, strict=True)
    )
    # Of the batch itself all or nothing: a microbatch is not the batch that the user gives.
    return _Trace(trace.key, region, shift) if region[0] == trace.region[0] else None


def _is_wide(node: fx.Node, source: fx.Node) -> bool:
    """Whether every value of the source fits: a narrower integer would wrap around."""
    new, old = torch.iinfo(node.meta["val"].dtype), torch.iinfo(source.meta["val"].dtype)
    return new.min <= old.min and old.max <= new.max
