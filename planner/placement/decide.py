"""Decide the type of every value over tp, at minimal cost for one block of each kind; its copies follow it.

``planner.report.alternatives`` solves the same problem with the type of one parameter fixed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.blocks.blocks import Blocks
from passes.errors import PlanError
from passes.partition.type_changes import Placements
from passes.program.ops.aten import value_bytes
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.rules.flops import node_flops
from passes.types.types import Placement, evenly
from planner.placement.candidates import Candidates, Cutting
from planner.placement.overrides import Asked, Overrides, asked_of
from planner.placement.solve import Costs, Edge, Solution, Weights, solve


@dataclass(frozen=True)
class Problem:
    """The typing problem: the options of the nodes of one block per kind, and their costs. ``representative``: node →
    the node that decides for it, in program order; ``asked``: placeholder → the override that constrains it.
    """

    candidates: Candidates
    costs: Costs
    edges: Mapping[str, list[Edge]]
    weights: Weights
    representative: dict[str, str]
    asked: dict[str, Asked]
    wishes: Overrides

    def solve(self) -> Solution:
        return solve(self.candidates, self.costs, self.edges, self.weights)

    def decided(self) -> Placements:
        """Return the cheapest types of all nodes. Raises PlanError if an override contradicts them."""
        options, asked, rep = self.solve().options, self.asked, self.representative
        self.wishes.check(options)
        origins = {n: f"override {asked[n].pattern}" if n in asked else "solver" for n in rep}
        styles = {name: wish.style for name, wish in asked.items()}
        sizes = self.candidates.sizes
        return Placements(sizes["tp"], {n: options[rep[n]] for n in rep}, origins, styles, sizes["etp"])


def typing_problem(
    program: Program,
    blocks: Blocks,
    cutting: Cutting,
    *,
    held: Mapping[str, Placement] | None = None,
    freed: str = "",
) -> Problem:
    """Return the possible types of every node, with their costs.

    ``held``: parameter name → its type, if decided; ``freed``: representative of parameters without their override.
    Raises PlanError if an override, a decided type, or sharding of the sequence is not possible.
    """
    nodes = [n for n in program.graph.graph.nodes if n.op != "output"]
    rep: dict[str, str] = {n.name: blocks.representative.get(n.name) or n.name for n in nodes}
    times = blocks.times_of_nodes(program)
    edges, producers, readers = _edges(program, nodes, rep, times)
    chosen = [n for n in nodes if rep[n.name] == n.name]
    candidates = Candidates(chosen, cutting, producers, readers)
    costs, weights = _costs(program, nodes, rep, blocks, times), Weights()
    if cutting.sequence_parallel and cutting.tp > 1:
        plain, seeds = candidates.cuts, sequence_cuts(program, blocks, rep, cutting.tp)
        candidates = Candidates(chosen, cutting, producers, readers, seeds)
        tokens = frozenset((n, c) for n, cuts in candidates.cuts.items() for c in cuts if c not in plain.get(n, ()))
        costs, weights = replace(costs, tokens=tokens), replace(weights, whole=2.0)
    asked = asked_of(program, cutting.overrides) if cutting.tp > 1 else {}
    asked = {name: wish for name, wish in asked.items() if rep[name] != freed}
    wishes = Overrides(program, candidates, asked)
    wishes.constrain()
    _hold(program, candidates, held or {})
    _keep_features_whole(program, blocks, rep, candidates)
    loss = rep[program.loss]
    candidates.options[loss] = [o for o in candidates.options[loss] if o.out.kind == "I"]
    return Problem(candidates, costs, edges, weights, rep, asked, wishes)


def _edges(
    program: Program, nodes: list[fx.Node], rep: dict[str, str], times: Mapping[str, int]
) -> tuple[dict[str, list[Edge]], dict[str, list[fx.Node]], dict[str, list[fx.Node]]]:
    """Return (edges by "reader:position", producers by node, readers by node) of representatives, over all copies."""
    copies: dict[tuple[str, str], set[str]] = {}
    producers: dict[str, dict[str, fx.Node]] = {}
    readers: dict[str, dict[str, fx.Node]] = {}
    for node in nodes:
        reader = program.node(rep[node.name])
        for position, (value, inner) in enumerate(zip(node.all_input_nodes, reader.all_input_nodes, strict=True)):
            source = program.node(rep[value.name])
            copies.setdefault((f"{reader.name}:{position}", source.name), set()).add(value.name)
            producers.setdefault(inner.name, {})[source.name] = source
            readers.setdefault(source.name, {})[reader.name] = reader
    edges: dict[str, list[Edge]] = {}
    for (place, source), names in copies.items():
        edges.setdefault(place, []).append(
            Edge(program.node(source), frozenset(names), sum(times.get(name, 1) for name in names))
        )
    return edges, {k: list(v.values()) for k, v in producers.items()}, {k: list(v.values()) for k, v in readers.items()}


def _costs(
    program: Program, nodes: list[fx.Node], rep: dict[str, str], blocks: Blocks, times: Mapping[str, int]
) -> Costs:
    """Return costs in units of one block: its FLOPs, the bytes of its matrices, and of the tensor between blocks."""
    instances = Counter[str]()
    for name, representative in rep.items():
        instances[representative] += times.get(name, 1)
    flops = {n.name: float(node_flops(n)) for n in nodes if rep[n.name] == n.name and n.op == "call_function"}
    matrix = {
        n.name: float(value_bytes(n))
        for n in nodes
        if rep[n.name] == n.name and n.meta.get("parameter") and len(n.meta["val"].shape) > 1
    }
    count = max(1, blocks.num_blocks)
    block_flops = max(1.0, sum(v * instances[k] for k, v in flops.items()) / count)
    block_bytes = max(1.0, sum(v * instances[k] for k, v in matrix.items()) / count)
    residual = _residual_bytes(program, blocks, [n for n in nodes if flops.get(n.name)], times)
    return Costs(
        {k: v / block_flops for k, v in flops.items()},
        {k: v / block_bytes for k, v in matrix.items()},
        {n.name: value_bytes(n) / residual for n in nodes},
        dict(instances),
    )


def _residual_bytes(program: Program, blocks: Blocks, products: list[fx.Node], times: Mapping[str, int]) -> float:
    """Return the median bytes of values between blocks; without blocks, the lower quartile of results of products."""
    between = _between_blocks(program, blocks)
    sizes = sorted(value_bytes(n) for n in between for _ in range(times.get(n.name, 1)))
    if sizes:
        return float(max(sizes[len(sizes) // 2], 1))
    results = sorted(value_bytes(n) for n in products if n.meta.get("grad"))
    return float(max(results[len(results) // 4], 1)) if results else 1.0


def _between_blocks(program: Program, blocks: Blocks) -> list[fx.Node]:
    """Return the tensors with a gradient that a block computes and something outside of it reads."""
    block_of = {name: block.index for block in blocks.instances for name in block.nodes}
    return [
        n
        for n in program.graph.graph.nodes
        if n.name in block_of
        and n.meta.get("grad")
        and isinstance(n.meta["val"], torch.Tensor)
        and any(block_of.get(u.name) != block_of[n.name] for u in n.users)
    ]


def _hold(program: Program, candidates: Candidates, held: Mapping[str, Placement]) -> None:
    for name, options in candidates.options.items():
        wanted = held.get(program.parameters.get(name, ""))
        if wanted is not None:
            candidates.options[name] = [o for o in options if o.out == wanted]
            if not candidates.options[name]:
                what = f"{program.parameters[name]} cannot be {wanted}, as another length has it"
                raise PlanError(what, where="inputs", fix="use one length")


def _keep_features_whole(program: Program, blocks: Blocks, rep: dict[str, str], candidates: Candidates) -> None:
    """Forbid sharded features between blocks: each norm and linear that reads them would need a collective."""
    for node in _between_blocks(program, blocks):
        last, name = node.meta["val"].dim() - 1, rep[node.name]
        candidates.options[name] = [o for o in candidates.options[name] if not (o.out.is_sharded and o.out.dim == last)]


def sequence_cuts(program: Program, blocks: Blocks, rep: dict[str, str], tp: int) -> dict[str, Placement]:
    """Return the sharding of values between blocks along the sequence, the dim before the features: by representative.

    A sequence that tp does not divide is padded: with 17 tokens over tp = 2, each rank has 9, the last one padding.
    Raises PlanError if a rank would have only padding.
    """
    cuts: dict[str, Placement] = {}
    for node in _between_blocks(program, blocks):
        shape = tuple(node.meta["val"].shape)
        if len(shape) < 2:
            continue
        dim = len(shape) - 2
        if shape[dim] < tp:
            raise PlanError(
                f"sequence parallelism: a sequence of {shape[dim]} is shorter than tp = {tp}",
                where=where_of(node),
                fix=f"use sequences of {tp} or more, or set tensor_parallel.sequence_parallel: false",
            )
        cuts[rep[node.name]] = evenly(dim, shape[dim], tp)
    if not cuts:
        raise PlanError(
            "sequence parallelism: the model has no repeated blocks with activations to shard",
            where="tensor_parallel.sequence_parallel",
            fix="set tensor_parallel.sequence_parallel: false",
        )
    return cuts
