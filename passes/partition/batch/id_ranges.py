"""The integers that a batch may hold: ids that the graph looks up, and classes of its labels.

    embedding(W[n, h], ids)                        0 ≤ id < n
    cross_entropy(logits[.., c], labels, skipped)  0 ≤ label < c, or skipped
    index_select, gather of n along a dim          0 ≤ i < n            x[ids]    -n ≤ i < n
    one_hot(ids, n)                                0 ≤ id < n

Followed from each integer input through ops that only move its values: they run on the places of these values. Values
that a slice drops may be anything, so the part of a sequence that is looked up is known exactly. If it is no box, and
after any arithmetic, there is no range: a value outside of a range fails in the unmodified model too.

Rows that a forward looks up by numbers of its own, such as positions, must be there too: ``wpe[n, h](arange(length))``
needs length ≤ n. No batch holds these numbers, so no check of a batch finds them, and the shapes alone are fine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import PlanError
from passes.partition.loss.scored import is_integer
from passes.partition.sequence.facts import rows
from passes.program.known_values import MOST_ELEMENTS, computed, value_of
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import CASTS, CROSS_ENTROPIES, MOVES
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


def id_ranges(program: Program) -> dict[str, tuple[IdRange, ...]]:
    """Map each batch key to the ranges of its values; keys without a certain range are left out."""
    graph = program.graph.graph
    cuts: Any = graph.find_nodes(op="call_function", target=local_rows)
    of_ranks = [_places(program, rank) for rank in range(max((cut.args[2] for cut in cuts), default=1))]
    inputs = {node: places for node, places in of_ranks[0].items() if node.name in program.inputs}
    found: dict[str, dict[IdRange, None]] = {}
    for node in graph.nodes:
        is_reader = node.op == "call_function" and any(n in of_ranks[0] for n in node.all_input_nodes)
        for ids, ask in _lookups(node, program) if is_reader else ():
            held = [places[ids].flatten() for places in of_ranks if ids in places]
            for source, part in _parts(torch.cat(held), inputs) if held else ():
                found.setdefault(program.inputs[source.name], {})[replace(ask, part=part)] = None
    return {key: tuple(ranges) for key, ranges in found.items()}


def _parts(held: Tensor, inputs: Mapping[fx.Node, Tensor]) -> Iterator[tuple[fx.Node, tuple[Span, ...]]]:
    """Yield each input with elements at the places ``held``, and these as spans of one sequence. Of the batch all
    or nothing: a microbatch is not the batch that the user gives.
    """
    for node, own in inputs.items():
        at = held[(held >= own.min()) & (held <= own.max())].unique() - own.min()
        spans = [(int(x.min()), int(x.max()) + 1) for x in torch.unravel_index(at, own.shape)] if len(at) else []
        if len(at) == prod(stop - start for start, stop in spans) and spans[:1] == [(0, len(own))]:
            yield node, tuple(spans[1:])


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
    """Yield the ids that a call reads, and their range."""
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


FIRST = 1 << 40  # the first place: no id is as large


def _places(program: Program, rank: int) -> dict[fx.Node, Tensor]:
    """Map each value with unchanged elements of inputs to their places among those of all inputs, on ``rank`` of cp;
    other elements are below FIRST.
    """
    known, first = dict[fx.Node, Tensor](), FIRST
    for node in program.graph.graph.nodes:
        if node.name in program.inputs and is_integer(node) and prod(shape_of(node)):
            known[node] = torch.arange(first, first + prod(shape_of(node))).view(shape_of(node))
            first += known[node].numel()
        elif not known.keys().isdisjoint(node.all_input_nodes) and (moved := _moved(node, known, rank)) is not None:
            known[node] = moved
    return known


def _moved(node: fx.Node, known: Mapping[fx.Node, Tensor], rank: int) -> Tensor | None:
    source, args = node.all_input_nodes[0], node.args
    if node.target is local_rows and source in known:
        _, dim, cp = args
        return torch.cat([known[source].narrow(dim, a, b - a) for a, b in rows(shape_of(source)[dim], cp, rank)], dim)  # pyright: ignore
    is_value = isinstance(node.meta.get("val"), Tensor) and is_integer(node)
    if node.target not in MOVES or not is_value or prod(shape_of(node)) > MOST_ELEMENTS:
        return None
    if node.target in CASTS:  # a narrower integer would wrap around
        new, old = (torch.iinfo(n.meta["val"].dtype) for n in (node, source))
        return known.get(source) if new.min <= old.min and old.max <= new.max else None
    return computed(node, lambda n: known[n] if n in known else torch.zeros(shape_of(n), dtype=torch.int64))
