"""The regions that CUDA graphs capture: parts of blocks by scope, and every value that crosses their borders.

A conversion (change of type) runs in the region of its readers if they are all in one, else in the region that computes
the value. So a gather before a region belongs to the region, and the smaller shard crosses the border. Partial sums are
reduced in the region that computes them.

The parts of one block are its attention and the rest, found by the ops that compute scores, never by names:

    attn    probabilities @ v, all its inputs, and the ops up to the residual add:
            norm → q, k, v → scores → @ v → output projection | + x
    mlp     the rest of the block

A block with two attentions (a decoder that also reads an encoder) has a part for each. A part contains all its inputs
within the block, except those in earlier parts. So none of its inputs depends on its outputs, and it runs as one call.

No CUDA graph captures calls that wait for the device, have a data-dependent shape, or run custom Python. For experts,
the host waits for the exchange of counts, which gives the number of rows of all ops up to the combine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem

from torch import fx

from passes.blocks.blocks import Block
from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.moe.ties import is_grouped
from passes.partition.type_changes import runs_here, type_at, wanted_types
from passes.pieces import Region, home_of
from passes.program.ops.aten import num_addends, reads_on_host
from passes.program.ops.own_backward import OwnBackward
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, readers, walk
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.placement.attention import mixes_values
from planner.regions.expert_parts import EXPERT_PARTS, WHOLE, expert_parts_of, layers_of, of_uncertain_size
from planner.sharding.shards import Shards, value_at
from planner.spec.sections import FULL_ITERATION, CudaGraphsSpec

LAYER = "layer"


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """The row of a region: whether a CUDA graph captures it, or the ``reason`` why not; names of inputs and outputs.

    ``bytes``: static memory of one slot on one rank.
    """

    block: str
    scope: str
    captured: bool
    reason: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    bytes: int = 0


def decide_regions(asked: CudaGraphsSpec, decisions: Decisions, shards: Shards) -> tuple[Region, ...]:
    """Return the regions of all stages, in the order of the blocks; none without graphs, or if one graph captures a
    full iteration.

    Raises PlanError for a scope that the model does not have, and if no region can be captured.
    """
    if asked.impl == "none":
        return ()
    if FULL_ITERATION in asked.scope:
        running = decisions.stages.stage_of
        for refused in uncapturable(n for n in decisions.program.graph.graph.nodes if n.name in running):
            raise _nothing_captured(f"no CUDA graph can capture a {FULL_ITERATION} of the model", refused)
        return ()
    regions, refusals = _regions(asked.scope, decisions)
    _check_scope(asked.scope, regions, decisions)
    if len(refusals) == len(regions):
        raise _nothing_captured(f"no CUDA graph can capture any of the model's {len(regions)} regions", refusals[0])
    for stage in range(decisions.stages.num_stages):
        _find_borders(stage, [r for r in regions if r.stage == stage], decisions, shards)
    return tuple(regions)


def rows_of(regions: Sequence[Region]) -> tuple[GraphRegion, ...]:
    return tuple(
        GraphRegion(
            region.block,
            region.scope,
            not region.refused,
            region.refused,
            tuple(name for name, _ in region.inputs),
            tuple(name for name, _ in region.outputs),
            0 if region.refused else region.static_bytes,
        )
        for region in regions
    )


# ---- choice of regions


def _check_scope(scope: Collection[str], regions: Sequence[Region], decisions: Decisions) -> None:
    present = {region.scope for region in regions}
    missing = [part for part in scope or [LAYER] if part not in present]
    if not missing:
        return
    doubts = decisions.experts.doubts if EXPERT_PARTS & set(missing) else ()
    why = "".join(f"; apparent experts are not recognized: {doubt.why}" for doubt in doubts[:1])
    raise PlanError(
        f"no block of the model has a part {' or '.join(missing)} that a graph could capture{why}",
        where=doubts[0].where if doubts else "cuda_graphs.scope",
        fix="leave scope empty for whole layers, or set impl: none",
    )


def _nothing_captured(what: str, refused: Refusal) -> PlanError:
    node, why = refused
    return PlanError(f"{what}: {why}", where=where_of(node), fix="choose another cuda_graphs.scope, or set impl: none")


def _regions(scope: Collection[str], decisions: Decisions) -> tuple[list[Region], list[Refusal]]:
    """Return all regions, and the refusals of those that no graph captures."""
    program, stages = decisions.program, decisions.stages
    on_batch = set(walk(map(program.node, program.inputs), readers))
    regions, refusals = list[Region](), list[Refusal]()
    for block in decisions.blocks.instances:
        for part, nodes in _parts(block, scope, decisions, on_batch):
            stage = stages.stage_of[nodes[0].name]
            refused = _refusal_of_experts(part, nodes, decisions) or refusal(nodes, stage, decisions)
            refusals += [refused] if refused else []
            reason = f"{where_of(refused[0])}: {refused[1]}" if refused else ""
            names = frozenset(node.name for node in nodes)
            regions.append(Region(len(regions), stage, block.path, part, names, reason))
    return regions, refusals


def _parts(
    block: Block, scope: Collection[str], decisions: Decisions, on_batch: Collection[fx.Node]
) -> list[tuple[str, list[fx.Node]]]:
    calls = _with_items(decisions.calls_of(block))
    if not scope:
        return [(LAYER, calls)] if calls else []
    parts, layers = parts_of(calls, on_batch), layers_of(calls, decisions.experts.layers)
    if layers and EXPERT_PARTS & set(scope):
        rest = next((nodes for part, nodes in parts if part == REST), [])
        parts = [(part, nodes) for part, nodes in parts if part != REST]
        parts += [(WHOLE, rest)] if WHOLE in scope else expert_parts_of(rest, layers, on_batch)
    parts = [(part, _with_items(nodes)) for part, nodes in parts if part in scope]
    return [(part, nodes) for part, nodes in parts if nodes]


def _with_items(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes with each getitem moved to the part of its list: tensors cross borders, lists do not."""
    inside = set(nodes)
    inside -= {node for node in nodes if node.target is getitem and node.all_input_nodes[0] not in inside}
    return sorted(inside | {user for node in inside for user in node.users if user.target is getitem})


def _refusal_of_experts(part: str, nodes: Sequence[fx.Node], decisions: Decisions) -> Refusal | None:
    node = of_uncertain_size(nodes, decisions.experts.layers) if part == WHOLE else None
    if node is None or domain_of(node) is not None:
        return None
    return node, f"the number of rows per expert in {node.target} depends on the routing: moe needs fixed-size slots"


# ---- values that cross borders


def _find_borders(stage: int, regions: Sequence[Region], decisions: Decisions, shards: Shards) -> None:
    program, stages, placements = decisions.program, decisions.stages, decisions.placements
    owner = {name: region for region in regions for name in sorted(region.nodes) if not region.refused}
    homes = {(c.value, c.after): home_of(c, owner) for c in shards.changes[stage]}
    held = program.parameters.keys() | program.buffers.keys() | program.constants.keys()
    value = partial(value_at, decisions)
    for node, wanted, reader in wanted_types(placements, stages, program, stage):
        made = owner.get(node.name) if node.op != "placeholder" and runs_here(stages, node, stage) else None
        read = owner.get(reader)
        arrives = type_at(placements, stages, node, stage)
        home = homes.get((node.name, wanted)) if wanted != arrives else None
        if node.name in held and (wanted == arrives or home is read):
            continue  # weights are passed in without a copy, unless a conversion outside computes what crosses
        if made is not None and made is not read:
            leaves = wanted if home is made and wanted != arrives else arrives
            made.outputs.setdefault((node.name, leaves), value(node.name, leaves))
        if read is not None and made is not read:
            enters = arrives if wanted == arrives or home is read else wanted
            read.inputs.setdefault((node.name, enters), value(node.name, enters))
    for region in regions:
        region.through = {key for key in region.inputs if _is_read_again(key, region, decisions, homes)}


def _is_read_again(
    key: tuple[str, Placement],
    region: Region,
    decisions: Decisions,
    homes: Mapping[tuple[str, Placement], Region | None],
) -> bool:
    """Whether the gradient of an input has several addends from the region, and more from ops that run after it."""
    (name, kind), program, stages = key, decisions.program, decisions.stages
    node = program.node(name)
    if not node.meta.get("grad"):
        return False
    reading = [n for n in node.users if n.op == "call_function" and stages.runs_on(n.name, region.stage)]
    inner = [n for n in reading if n.name in region.nodes]
    wanted = {n: decisions.placements.wanted(n, n.all_input_nodes.index(node)) for n in inner}
    direct = sum(num_addends(n, node) for n in inner if wanted[n] == kind)
    changed = {w for w in wanted.values() if w != kind and homes.get((name, w)) is region}
    if direct + len(changed) < 2:
        return False
    is_sent = region.stage < stages.num_stages - 1 and name in stages.live[region.stage]
    outer = [n for n in reading if n.name not in region.nodes]
    return is_sent or (bool(outer) and _some_after(outer, region, program))


def _some_after(outer: Collection[fx.Node], region: Region, program: Program) -> bool:
    """Whether some nodes of ``outer`` run after the region, which runs as soon as its inputs are ready."""
    nodes = sorted(map(program.node, region.nodes))  # nodes compare by their order in the graph
    first = nodes[0]
    needed = set(walk(nodes, operands, into=lambda node: node >= first))
    return any(node > first and node not in needed for node in outer)


ATTENTION, REST = "attn", "mlp"


def parts_of(block: Sequence[fx.Node], on_batch: Collection[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """Return (part, nodes) in the order in which they run; ``on_batch``: the nodes that depend on a batch tensor."""
    inside, taken = set(block), set[fx.Node]()
    parts: list[tuple[str, list[fx.Node]]] = []
    for mixed in (node for node in block if mixes_values(node)):
        if mixed in taken:
            continue
        branch = _until_the_residual(mixed, inside, on_batch)
        feeding = set(walk(branch, operands, into=lambda n, before=frozenset(taken): n in inside and n not in before))
        parts.append((ATTENTION, [node for node in block if node in feeding]))
        taken |= feeding
    rest = [node for node in block if node not in taken]
    return [*parts, (REST, rest)] if rest else parts


def _until_the_residual(mixed: fx.Node, inside: Collection[fx.Node], on_batch: Collection[fx.Node]) -> list[fx.Node]:
    """Return ``mixed`` and its dependents, up to the residual: the sum with another value of the batch."""
    made = set(walk([mixed], readers, into=lambda n: n in inside))

    def goes_on(node: fx.Node) -> bool:
        others = [n for n in node.all_input_nodes if n not in made and n in on_batch and n.meta.get("grad")]
        return node in inside and not (getattr(node.target, "_opname", "") == "add" and others)

    return list(walk([mixed], readers, into=goes_on))


Refusal = tuple[fx.Node, str]  # the first call that prevents a capture, and the reason
_ROUTED = {exchange.meet, *exchange.MOVING, *exchange.OF_TOKENS}


def refusal(nodes: Sequence[fx.Node], stage: int, decisions: Decisions) -> Refusal | None:
    """Return why no graph can capture a part of a block; None if one can."""
    for obstacle in uncapturable(nodes):
        return obstacle
    for node in nodes:
        if decisions.stages.stage_of[node.name] != stage:
            return node, f"{node.target} runs on a later stage than the start of the block"
    returning = _comes_back(nodes)
    if returning is None:
        return None
    return returning, f"{returning.target} reads a value that was computed outside from a result of the region"


def uncapturable(nodes: Iterable[fx.Node]) -> Iterator[Refusal]:
    """Yield the calls that no graph can capture in any region, with the reason."""
    for node in nodes:
        if isinstance(node.target, OwnBackward):
            yield node, f"{node.target} is a custom autograd.Function, which may run any Python code"
        elif _is_routed(node):
            yield node, "rows are dispatched to the ranks of their experts, and the host waits for the counts"
        elif is_grouped(node) and node.target.namespace != "aten":  # pyright: ignore
            yield node, f"{node.target} reads the row counts of experts on the host"
        elif reads_on_host(node.target, node.args, lambda value: value.meta["val"]):
            yield node, f"the output shape of {node.target} is data-dependent: the host would wait for it"


def _is_routed(node: fx.Node) -> bool:
    domain = domain_of(node)
    return node.target in _ROUTED or (domain is not None and domain.rows >= 0)


def _comes_back(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return a node of the region that reads a value computed outside from the region's values, or None."""
    inside, outside = set(nodes), set[fx.Node]()
    node, last = nodes[0], nodes[-1]
    while node is not last.next:
        reads_outside = any(n in outside for n in node.all_input_nodes)
        if node in inside:
            if reads_outside:
                return node
        elif reads_outside or any(n in inside for n in node.all_input_nodes):
            outside.add(node)
        node = node.next
    return None
