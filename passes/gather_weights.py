"""Gather weights that ranks hold in shards (zero 3) before each visit of a block, in the forward and the backward.

    y = linear(x, W); z = gelu(y); o = linear(z, V)
    →  need_weights(gate, units of W and V, those of the next visit)
       y = linear(x, W);  need_again(gate, y, units, those of the visit before)
       z = gelu(y)
       o = linear(z, V);  need_again(gate, o, …)

Autograd runs the ops of a stage in the exact reverse of their order, so the first backward of a visit to ask is that of
its last reader. A recomputation asks before it begins: on all ranks at the last op of its block, since which op needs a
freed value first depends on the rows that the experts of a rank have. A view of a weight is read where its readers are.

Weights that other ranks update (zero 1) are awaited before their first reader, bucket by bucket, not all before the
first forward. The gathers of an update start in the order in which a forward reads their buckets, and run meanwhile:

    h = linear(x, W)   →   await_bucket(gate, buffer, bucket of W);  h = linear(x, W)

Needs:   a finished graph: these calls give no values, so dead-code elimination would drop them.
Leaves:  every read of a sharded weight has its unit among those of the last ``need_weights`` before it, and every
         read of a gathered parameter comes after the wait for its bucket.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.moe import exchange
from passes.ops.parameter_gate import Units, await_bucket, need_again, need_weights
from passes.ops.recompute import MARKS, begin_block, end_block
from passes.ops.region import run_piece
from passes.ops.vocabulary import vocabulary_embedding

BACK_WITHOUT_WEIGHT = (torch.ops.aten.embedding.default, vocabulary_embedding)
Aliases = dict[fx.Node, frozenset[tuple[int, int]]]


@dataclass
class Visit:
    """Ops of one block, one after the other, that read weights. ``back``: the units that their backward reads.
    ``ahead``: those of the next visit; ``behind``: those of the visit before that a backward reads."""

    home: Any
    units: Units = ()
    readers: list[fx.Node] = field(default_factory=list)
    back: Units = ()
    ahead: Units = ()
    behind: Units = ()


def gather_weights(stage: StageGraph, context: LowerContext) -> None:
    """Insert one call before each visit, and one behind each op that reads weights."""
    visits = visits_of(stage, context)
    if not visits:
        return
    gate = stage.handle("gate", context.gate)
    for visit in visits:
        with stage.graph.inserting_before(visit.readers[0]):
            stage.graph.call_function(need_weights, (gate, visit.units, visit.ahead))
        for reader in visit.readers if visit.back else ():
            with stage.graph.inserting_after(reader):
                stage.graph.call_function(need_again, (gate, reader, visit.back, visit.behind))
    _before_recomputations(stage, context, visits, gate)


def visits_of(stage: StageGraph, context: LowerContext) -> list[Visit]:
    """Return the visits of a stage in its order; none if no weight is sharded."""
    if not context.homes:
        return []
    places, visits = aliases_of(stage, context), list[Visit]()
    for node in stage.graph.nodes:
        read = _read_by(node, places)
        if node.op != "call_function" or node.target in MARKS or not read:
            continue
        home = context.homes.get(node.meta.get("origin", ""))
        if not visits or visits[-1].home != home:
            visits.append(Visit(home))
        visit = visits[-1]
        visit.units = tuple(sorted({*visit.units, *read}))
        visit.readers.append(node)
        if _gets_a_gradient(node, context) and node.target not in BACK_WITHOUT_WEIGHT:
            visit.back = tuple(sorted({*visit.back, *read}))
    for end, read in _read_again(stage, places):
        if (visit := _visit_before(end, visits, context)) is not None:
            visit.back = tuple(sorted({*visit.back, *read}))
    for visit, after in pairwise(visits):
        visit.ahead = after.units
    for before, visit in pairwise(visit for visit in visits if visit.back):
        visit.behind = before.back
    return visits


def moves_of(visits: Sequence[Visit], *, forward: bool) -> list[tuple[Units, Units]]:
    """Return (units, units ahead) of each visit of one forward, or of one backward."""
    if forward:
        return [(visit.units, visit.ahead) for visit in visits]
    return [(visit.back, visit.behind) for visit in reversed(visits) if visit.back]


def aliases_of(stage: StageGraph, context: LowerContext) -> Aliases:
    """Return for each value the units in the memory of which it may lie."""
    found = {node: frozenset((place,)) for node, place in buckets_of(stage, context).items()}
    return _followed(stage.graph, stage.root, found)


def _followed(graph: fx.Graph, root: Any, found: Aliases) -> Aliases:
    """Add the units of weights of which a compiled piece returns views."""
    for node in graph.nodes:
        read: Any = _read_by(node, found) if node.op == "call_function" else ()
        if read and node.target is run_piece:
            inner = getattr(root, node.args[0].target).module.graph
            given = zip(inner.find_nodes(op="placeholder"), node.args[1], strict=True)
            inside = _followed(inner, None, {held: found[outer] for held, outer in given if outer in found})
            read = _read_by(inner.output_node(), inside)
        elif not may_alias(node):
            continue
        if read:
            found[node] = read
    return found


def may_alias(node: fx.Node) -> bool:
    """Return whether a call may give memory of an argument: a view, an op that copies only if it must, an identity."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(value.alias_info is not None for value in node.target._schema.returns)
    return node.target in (operator.getitem, exchange.with_gradient) or "change" in node.meta


def _read_by(node: fx.Node, places: Aliases) -> frozenset[tuple[int, int]]:
    return frozenset().union(*(places[value] for value in node.all_input_nodes if value in places))


def _gets_a_gradient(node: fx.Node, context: LowerContext) -> bool:
    if "origin" not in node.meta:
        return bool(node.meta.get("grad"))
    return bool(context.lowering.program.node(node.meta["origin"]).meta.get("grad"))


def _before_recomputations(stage: StageGraph, context: LowerContext, visits: list[Visit], gate: fx.Node) -> None:
    """Gather the weights of a block's visit before a rerun that reads them."""
    for end, read in list(_read_again(stage, aliases_of(stage, context))):
        handle: Any = end.args[0]
        visit = _visit_before(end, visits, context)
        units, ahead = (visit.back, visit.behind) if visit is not None else (tuple(sorted(read)), ())
        getattr(stage.root, handle.target).before = partial(need_weights, context.gate, units, ahead)
        # the last op of the block with a gradient
        if (last := next((n for n in _backwards(end) if _gets_a_gradient(n, context)), None)) is not None:
            with stage.graph.inserting_after(last):
                stage.graph.call_function(need_again, (gate, last, units, ahead))


def _read_again(stage: StageGraph, places: Aliases) -> Iterator[tuple[fx.Node, frozenset[tuple[int, int]]]]:
    """Yield the end of each block with a rerun that reads weights, and their units."""
    for end in stage.graph.find_nodes(op="call_function", target=end_block):
        read = frozenset().union(*(places.get(v, frozenset()) for v in end.args[2] if isinstance(v, fx.Node)))
        if read:
            yield end, read


def _visit_before(end: fx.Node, visits: list[Visit], context: LowerContext) -> Visit | None:
    """Return the visit of the block that ends at ``end``."""
    home = next((h for node in _backwards(end) if (h := context.homes.get(node.meta.get("origin", "")))), None)
    return next((visit for visit in reversed(visits) if visit.home == home), None)


def _backwards(end: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls of a block, the last first."""
    node = end.prev
    while node.op == "call_function" and node.target is not begin_block:
        yield node
        node = node.prev


def await_parameters(stage: StageGraph, context: LowerContext) -> None:
    """Insert one wait a bucket and stage, before the first op that reads one of its parameters."""
    if context.homes:  # they are gathered in the graph (passes.gather_weights)
        return
    places, seen = buckets_of(stage, context), set[tuple[int, int]]()
    if not places:
        return
    gate = stage.handle("gate", context.gate)
    for node in list(stage.graph.nodes):
        for value in node.all_input_nodes:
            place = places.get(value)
            if place is not None and place not in seen:
                seen.add(place)
                with stage.graph.inserting_before(node):
                    stage.graph.call_function(await_bucket, (gate, *place))


def buckets_of(stage: StageGraph, context: LowerContext) -> dict[fx.Node, tuple[int, int]]:
    """Return each parameter of the stage that other ranks update: its node → (buffer of this pp rank, its bucket)."""
    buckets, parameters = context.buckets, context.lowering.program.parameters
    names = {attribute: parameters[name] for name, attribute in stage.parameters.items()}
    nodes = stage.graph.find_nodes(op="get_attr") if buckets else []
    return {node: buckets[names[node.target]] for node in nodes if names.get(node.target) in buckets}
