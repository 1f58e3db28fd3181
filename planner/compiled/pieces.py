"""The pieces of a lowered stage that are compiled: maximal runs of plain ops, each one function.

A border is a call that is not compiled (``_border``): products, attention and lookups are one kernel already; random
draws keep the masks of eager runs; of ops on rows of experts, only those that act on each row alone are compiled. The
level of a call is the number of borders on the longest path to it. A path that leaves a piece over a border ends on a
higher level, so the ops of one level can run as one call, after all their inputs. Ops of one level that read each other
form a piece, without views at its ends: those cost nothing, and more pieces are equal without them. Equal pieces, in
all copies of a block and elsewhere, share one function.

Entering or leaving a captured region or a recomputed block is a border too, and the inputs of a region raise the level
of all its calls: its graph runs as one, so no piece may be both before and after it. The home of a call is

region   the captured part of a block: a piece is inside of its graph or outside
block    the recomputed block, and whether its backward reruns the call: a piece is rerun entirely or not at all
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.blocks.blocks import Places
from passes.errors import require
from passes.moe.domain import counts_rows, domain_of
from passes.pieces import CompiledPiece, Piece, Region
from passes.program.ops.aten import (
    aten,
    is_mutable,
    is_pointwise,
    is_random,
    is_view,
    packet_of,
    reads_on_host,
    tensors_of,
)
from passes.program.ops.groups import RESHAPES
from passes.program.ops.own_backward import OwnBackward
from passes.program.walks import readers, walk
from passes.rules.flops import has_flops
from planner.decisions import Decisions
from planner.recompute.decide import op_name
from planner.trace.lowered import Lowered

OURS = "a separate kernel, or a collective"
FEWEST_OPS = 2
FEWEST_ALONE = 3  # ops of a piece without copies: compiling a smaller one takes longer than it saves
TOO_FEW = "a single op between borders"
ALONE = f"fewer than {FEWEST_ALONE} ops, and no copies"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled pieces. ``eager``: (stage, captured name, reason) of each call that is not compiled."""

    pieces: tuple[CompiledPiece, ...] = ()
    eager: tuple[tuple[int, str, str], ...] = ()


def decide_compiled(asked: bool, lowered: Lowered) -> Compiled:
    """Return the pieces of all stages, in order; none if compilation is off."""
    if not asked:
        return Compiled()
    decisions, on_gradient = lowered.decisions, _on_gradient(lowered.decisions)
    eager, groups = dict[tuple[int, str, str], None](), dict[Any, _Group]()
    runs = list[tuple[int, list[fx.Node], bool, _Group]]()
    for index in range(lowered.num_stages):
        graph = lowered.stage(index).graph
        cut = _Cut(graph, decisions, on_gradient, _Homes(index, lowered.regions, lowered.recomputed))
        for nodes in cut.runs():
            group = groups.setdefault(_structure(nodes), _Group(sum(not is_free(node) for node in nodes)))
            group.add(nodes)
            runs.append((index, nodes, cut.home[nodes[0]].again, group))
        eager |= dict.fromkeys((index, node.meta["origin"], why) for node, why in cut.left.items())
    pieces, functions, apart = list[CompiledPiece](), dict[int, int](), list(eager)
    for stage, nodes, again, group in runs:
        if group.reason:
            apart += [(stage, node.meta["origin"], group.reason) for node in nodes if not is_free(node)]
            continue
        leaves = frozenset(nodes[i].meta["origin"] for i in group.left)
        number = functions.setdefault(id(group), len(functions))
        names = tuple(dict.fromkeys(node.meta["origin"] for node in nodes))
        pieces.append(CompiledPiece(len(pieces), stage, names, number, leaves, again))
    return Compiled(tuple(pieces), tuple(apart))


@dataclass
class _Group:
    """Runs that compute the same function. ``left``: indices of nodes with a value that some run returns."""

    num_ops: int
    num_runs: int = 0
    left: set[int] = field(default_factory=set)

    def add(self, nodes: Sequence[fx.Node]) -> None:
        inside = set(nodes)
        self.num_runs += 1
        self.left |= {i for i, node in enumerate(nodes) if any(user not in inside for user in node.users)}

    @property
    def reason(self) -> str:
        """The reason why the runs are too small to compile; empty if they are not."""
        if self.num_ops < FEWEST_OPS:
            return TOO_FEW
        return ALONE if self.num_ops < FEWEST_ALONE and self.num_runs == 1 else ""


def _on_gradient(decisions: Decisions) -> set[str]:
    """Return the calls with a gradient and their dependents: the rest is positions, labels and masks."""
    calls = [n for n in decisions.program.graph.graph.nodes if n.op == "call_function" and n.meta.get("grad")]
    return {node.name for node in walk(calls, readers)}


def _border(node: fx.Node, decisions: Decisions) -> str:
    """Return the reason why a call of a lowered stage is a border; empty if it is a plain op."""
    if node.target is operator.getitem:
        return _border(node.all_input_nodes[0], decisions)
    if "change" in node.meta:
        return OURS
    if isinstance(node.target, OwnBackward):
        return "a custom autograd.Function, which may run any Python code"
    if is_random(node) or is_random(decisions.program.node(node.meta["origin"])):
        return "a random draw"
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return OURS
    if domain_of(node) is not None and not _is_of_single_rows(node):
        return "the number of rows per expert depends on the routing"
    if target.namespace != "aten":
        return f"an op of {target.namespace}, not a torch op"
    if has_flops(node) or packet_of(target) is aten.embedding:
        return OURS
    if reads_on_host(target, node.args, lambda value: value.meta["val"]):
        return "its size is data-dependent"
    if is_mutable(target):
        return "it writes into an argument"
    values = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    return "complex numbers" if any(t.is_complex() for t in values) else ""


def _is_of_single_rows(node: fx.Node) -> bool:
    """Whether a call on rows of experts computes each row from that row and from values outside of the experts."""
    values = (node, *(v for v in node.all_input_nodes if domain_of(v) is not None))
    return all(map(counts_rows, values)) and (is_pointwise(node.target) or is_free(node))


def is_free(node: fx.Node) -> bool:
    """Whether a call computes nothing: a view or a reshape."""
    return node.target in RESHAPES or is_view(node)


@dataclass(frozen=True, slots=True)
class Home:
    """The indices of a call's ``region`` and ``block`` (None: outside); ``again``: the block's backward reruns it."""

    region: int | None = None
    block: int | None = None
    again: bool = False


OUTSIDE = Home()


class _Homes:
    """The homes of the calls of one stage: the region and recomputed block of each name, and the calls that rerun."""

    def __init__(self, stage: int, regions: Sequence[Region], recomputed: Sequence[Piece]) -> None:
        mine = [region for region in regions if region.stage == stage and not region.refused]
        self._region = {name: region.index for region in mine for name in sorted(region.nodes)}
        blocks = [piece for piece in recomputed if piece.stage == stage]
        self._block = {name: piece.index for piece in blocks for name in sorted(piece.nodes)}
        self._again = {call.name for piece in blocks for call in piece.again if call.changed is None}
        self.num_regions = len(mine)

    def of_calls(self, calls: Sequence[fx.Node]) -> dict[fx.Node, Home]:
        """Return the home of each call, given in the order of the stage. A view is rerun if its base is."""
        home_of: dict[fx.Node, Home] = {}
        for node in calls:
            name = node.meta["origin"]
            region, block = self._region.get(name), self._block.get(name)
            source = home_of.get(node.all_input_nodes[0]) if is_free(node) and node.all_input_nodes else None
            again = source.again if source is not None and source.block == block else name in self._again
            home_of[node] = Home(region, block, again)
        return home_of


@dataclass
class _Cut:
    """The division of one stage into runs: the ``home`` of each call, and why calls are in no piece (``left``)."""

    graph: fx.Graph
    decisions: Decisions
    on_gradient: set[str]
    homes: _Homes
    home: dict[fx.Node, Home] = field(default_factory=dict)
    left: dict[fx.Node, str] = field(default_factory=dict)

    def runs(self) -> list[list[fx.Node]]:
        """Return the runs of plain calls, without views at their ends, in the order of their first calls."""
        levels: dict[int, list[fx.Node]] = {}
        for node, level in self._levels().items():
            levels.setdefault(level, []).append(node)
        runs = [run for nodes in levels.values() for run in self._joined(self._trimmed(nodes))]
        return sorted(runs, key=lambda run: run[0])

    def _levels(self) -> dict[fx.Node, int]:
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        self.home = self.homes.of_calls(calls)
        self.left = {node: reason for node in calls if (reason := _border(node, self.decisions))}
        level = self._raised(calls, self.left)
        plain = [node for node in calls if node not in self.left]
        return {node: level[node] for node in plain if node.meta["origin"] in self.on_gradient}

    def _raised(self, calls: Sequence[fx.Node], ends: Collection[fx.Node]) -> dict[fx.Node, int]:
        """Return the level of each call, with all calls of a region at least at the level of its inputs. Iterates,
        because inputs of a region may follow its first call in the graph.
        """
        level, floor = dict[fx.Node, int](), dict[int, int]()
        for _ in range(self.homes.num_regions + 2):
            before = dict(floor)
            for node in calls:
                region = self.home[node].region
                near = [v for v in node.all_input_nodes if v in self.home and "change" not in v.meta]
                ways = {v: level.get(v, 0) for v in node.all_input_nodes}
                ways |= {v: ways[v] + (self.home[v] != self.home[node]) for v in near}  # from one home to another
                if region is not None:
                    outer = [way for v, way in ways.items() if self.home.get(v, OUTSIDE).region != region]
                    floor[region] = max([floor.get(region, 0), *outer])
                least = 0 if region is None else floor[region]
                level[node] = max([least, *ways.values()]) + (node in ends)
            if floor == before:
                return level
        raise AssertionError("captured regions of a stage read each other in a circle")

    def _trimmed(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes without views at the beginning and the end. An item of several results is not a view."""
        inside = set(nodes)
        for node in nodes:
            if is_free(node) and not any(v in inside for v in node.all_input_nodes):
                inside.discard(node)
        for node in reversed(nodes):
            is_result = node.target is operator.getitem and not is_free(node.all_input_nodes[0])
            if is_free(node) and not is_result and not any(user in inside for user in node.users):
                inside.discard(node)
        return [node for node in nodes if node in inside]

    def _joined(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Group the nodes into connected runs: nodes that read each other are in one run."""
        run_of, inside = dict[fx.Node, list[fx.Node]](), set(nodes)
        for node in nodes:
            mine = [node]
            for value in node.all_input_nodes:
                if value in inside and run_of[value] is not mine:
                    run_of[value] += mine
                    mine = run_of[value]
                    run_of.update(dict.fromkeys(mine, mine))
            run_of[node] = mine
        return list({id(run): sorted(run) for run in run_of.values()}.values())


def _structure(nodes: Sequence[fx.Node]) -> Any:
    """Return a key that is equal for runs with the same ops, constants, shapes, rows, dtypes, types, gradient flags."""
    number = {node: i for i, node in enumerate(nodes)}
    inputs: dict[fx.Node, int] = {}

    def shown(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in number:
            return f"%{number[value]}"
        return f"in {inputs.setdefault(value, len(inputs))} {_signature(value)}"

    return tuple((str(n.target), str(fx.map_arg((n.args, n.kwargs), shown)), _signature(n)) for n in nodes)


def _signature(node: fx.Node) -> str:
    shapes = [(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors_of(node)]
    return f"{shapes} {node.meta['placement']} {bool(node.meta.get('grad'))} {counts_rows(node)}"


@dataclass(frozen=True, slots=True)
class CompiledRow:
    """``ops`` that each rank of ``stage`` runs as one compiled ``function``; equal pieces share the function.

    With a ``reason`` against compiling, they run one by one, and ``function`` is -1. ``block`` and ``where`` (module
    and source line) are those of the first op.
    """

    block: str
    stage: int
    where: str
    ops: str
    function: int
    reason: str = ""

    def __post_init__(self) -> None:
        require((self.function < 0) == bool(self.reason), f"{self.ops} of stage {self.stage} is compiled, and is not")


def rows_of(compiled: Compiled, decisions: Decisions, places: Places) -> tuple[CompiledRow, ...]:
    """Return the rows of the pieces, then of the calls, except products and collectives, that run op by op."""
    program, rows = decisions.program, list[CompiledRow]()
    for piece in compiled.pieces:
        nodes = [node for node in map(program.node, piece.nodes) if not is_free(node)]
        ops = ", ".join(map(op_name, nodes))
        rows.append(CompiledRow(places.block(nodes[0]), piece.stage, places.text(nodes[0]), ops, piece.function))
    lines: dict[tuple[str, int, str, str], list[str]] = {}  # one row for all calls of a source line with one reason
    for stage, name, reason in compiled.eager:
        node = program.node(name)
        if reason not in ("", OURS) and not is_free(node):  # products and collectives separate pieces by design
            lines.setdefault((places.block(node), stage, places.text(node), reason), []).append(op_name(node))
    rows += (
        CompiledRow(block, stage, where, ", ".join(ops), -1, why) for (block, stage, where, why), ops in lines.items()
    )
    return tuple(rows)
