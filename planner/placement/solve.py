"""The cheapest typing of a graph, exactly: a small integer program (SciPy's HiGHS).

    x[n, o] ∈ {0, 1}       node n takes option o                       Σ_o x[n, o] = 1
    y[v, s, r, t] ∈ [0, 1] value v is made as s, and r reads it as t   Σ_s y[v, s, r, t] = Σ_{o wants t} x[r, o]
                                                                       Σ_t y[v, s, r, t] = Σ_{o gives s} x[v, o]
    z[v, s, t] ∈ [0, 1]    v is converted from s to t, once for all    y[v, s, r, t] ≤ z[v, s, t] for each reader r

so that all readers share one conversion, such as f. With equalities on both sides, the relaxation is integral if each
value has one reader; only shared conversions need branching. Cost terms of a block, from the largest weight to the
smallest: FLOPs that every rank repeats, matrices that every rank holds in full, bytes moved, number of collectives; see
``Weights``. One block of each kind is decided; its copies follow it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from torch import fx

from passes.errors import PlanError
from passes.partition.typings.base import Form
from passes.partition.typings.table import Option
from passes.program.weights import is_computed_weight
from passes.types.conversions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, conversion
from passes.types.types import I, Placement
from planner.placement.candidates import Candidates

# bytes that a collective moves, relative to an all-reduce, which is a reduce-scatter and an all-gather
_MOVED = {ALL_REDUCE: 1.0, ALL_GATHER: 0.5, REDUCE_SCATTER: 0.5, ALL_TO_ALL: 0.5}


@dataclass(frozen=True)
class Edge:
    """A value that feeds an input of a representative. ``copies``: names of the nodes that do so in the model, which
    can share a conversion; ``times``: their number, counting each run of a block."""

    value: fx.Node
    copies: frozenset[str]
    times: int


@dataclass(frozen=True)
class Weights:
    """The weights of the cost terms. Units: one block's FLOPs, its matrix bytes, one residual all-reduced, one call.

    One sum expresses the priority FLOPs, matrices, bytes, calls, as long as later terms cannot outweigh earlier ones.
    For a block, with s = 1 − 1/tp ≥ 1/2 the share of the work that a rank repeats without sharding:

        moved     up to 8 conversions of a residual, 2 calls each:         16 · (bytes + call)            =  17
        matrices  all replicated:                                          s · parameters                 ≥  50 > moved
        FLOPs     all repeated:                                            s · flops                      ≥ 500 > both

    so a block is sharded unless that saves less than 17/50 of its matrices and (17 + 100)/500 of its FLOPs. In between:

        reshard   parameters + moved = 117 < reshard < s · flops: saving a matrix does not justify resharding an
                  activation; saving 300/(1000 s) of a block's FLOPs does: 60 % at tp 2, a third at tp 16
        logits    more than parameters + moved = 117 too: a head is not replicated to save the collectives of a loss
        detour    less than moved, more than one conversion (2.1): a norm is sharded only if nothing else is possible
    """

    flops: float = 1e3
    parameters: float = 1e2
    bytes: float = 1.0
    call: float = 0.05
    step: float = 0.01  # a gradient summed once a step instead of once a microbatch
    reshard: float = 300.0  # a sharded activation gathered, or a replicated one sharded
    logits: float = 300.0  # a loss that reads full logits although it could read shards
    whole: float = 0.0  # a full activation on every rank; used with sequence parallelism, which can avoid it
    partial: float = 0.125  # factor on ``whole`` for a partial sum: its readers are linear and save nothing
    detour: float = 5.0  # statistics over sharded features
    kind: Mapping[str, float] = field(default_factory=lambda: {"I": 0.0, "R": 1e-5, "V": 0.0, "P": 1e-4})


@dataclass(frozen=True)
class Costs:
    """The cost of each node in those units: FLOPs, matrix and activation bytes, and the number of its copies."""

    flops: Mapping[str, float]
    matrix: Mapping[str, float]
    activation: Mapping[str, float]
    instances: Mapping[str, int]
    tokens: frozenset[tuple[str, Placement]] = frozenset()  # (value, its sharding along the sequence): reshard is free


@dataclass(frozen=True)
class Solution:
    """The option of each representative node, and their total cost in the units of ``Weights``."""

    options: dict[str, Option]
    cost: float = 0.0


def solve(candidates: Candidates, costs: Costs, edges: Mapping[str, list[Edge]], weights: Weights) -> Solution:
    """Return the cheapest options. ``edges``: "reader:position" → the values that feed it."""
    if max(candidates.sizes.values()) == 1 and (whole := _all_whole(candidates)) is not None:
        return Solution(whole)
    for most in (weights.reshard, inf):  # costs are ≥ 0: an optimum below ``most`` uses no term above it
        solution = _Program(candidates, costs, edges, weights, most).solve()
        if solution is not None and solution.cost < most:
            return solution
    raise PlanError(
        "no way to shard the model satisfies every constraint",
        where="tensor_parallel.overrides",
        fix="remove an override, or use tp: 1",
    )


def _all_whole(candidates: Candidates) -> dict[str, Option] | None:
    """Return full replication, the optimum for tp = 1; None if an override forbids it."""
    chosen: dict[str, Option] = {}
    for node in candidates.nodes:
        options = candidates.options[node.name]
        whole = next((o for o in options if o.out == I and all(argument == I for argument in o.args)), None)
        if whole is None:
            return None
        chosen[node.name] = whole
    return chosen


class _Program:
    """The integer program under construction. Conversions and options that cost ``most`` or more are excluded."""

    def __init__(
        self,
        candidates: Candidates,
        costs: Costs,
        edges: Mapping[str, list[Edge]],
        weights: Weights,
        most: float = inf,
    ) -> None:
        self.candidates, self.costs, self.edges, self.weights, self.most = candidates, costs, edges, weights, most
        self.objective: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.x: dict[tuple[str, int], int] = {}
        self.z: dict[tuple[Edge, Placement, Placement, bool], int] = {}
        self.num_readers = Counter(edge for of_input in edges.values() for edge in of_input)

    def solve(self) -> Solution | None:
        """Return the optimum; None if nothing satisfies every constraint."""
        for node in self.candidates.nodes:
            self._choose(node)
        for node in self.candidates.nodes:
            self._read(node)
        answer = self._run()
        if answer is None:
            return None
        options = {n.name: self._chosen(n, answer) for n in self.candidates.nodes}
        return Solution(options, float(np.dot(self.objective, answer)))

    def _variable(self, cost: float, integral: bool) -> int:
        self.objective.append(cost)
        self.integral.append(int(integral))
        return len(self.objective) - 1

    def _choose(self, node: fx.Node) -> None:
        options = self.candidates.options[node.name]
        for index, option in enumerate(options):
            self.x[node.name, index] = self._variable(self._option_cost(node, option, index), True)
        variables = [self.x[node.name, i] for i in range(len(options))]
        self.rows.append((variables, [1.0] * len(variables), 1.0, 1.0))

    def _option_cost(self, node: fx.Node, option: Option, index: int) -> float:
        weights, times = self.weights, self.costs.instances[node.name]
        cost = weights.kind[option.out.kind] + 1e-7 * index
        if option.detour:
            cost += weights.detour
        if option.whole:
            share = 1 - 1 / self.candidates.size(node)
            cost += share * weights.flops * self.costs.flops.get(node.name, 0.0)
            cost += share * weights.parameters * self.costs.matrix.get(node.name, 0.0)
        if option.whole and any(o.form is Form.CLASSES for o in self.candidates.options[node.name]):
            cost += weights.logits
        if (option.whole or option.form is Form.PARTIAL) and node.op == "call_function" and node.meta.get("grad"):
            cost += weights.whole * (1.0 if option.whole else weights.partial) * self.costs.activation[node.name]
        if node.op == "placeholder" and (option.out.kind == "R" or option.out.has_whole_segment):
            cost += weights.step * (1 + self.costs.activation[node.name])
        return cost * times

    def _read(self, node: fx.Node) -> None:
        """Add, for each input of ``node``, the flow from the producer's options to the reader's."""
        for position in range(len(node.all_input_nodes)):
            wanted: dict[tuple[Placement, bool], list[int]] = {}
            for index, option in enumerate(self.candidates.options[node.name]):
                picks = option.attends and option.args[position].is_sharded
                wanted.setdefault((option.args[position], picks), []).append(self.x[node.name, index])
            for edge in self.edges[f"{node.name}:{position}"]:
                self._flow(edge, wanted)

    def _flow(self, edge: Edge, wanted: Mapping[tuple[Placement, bool], list[int]]) -> None:
        made: dict[Placement, list[int]] = {}
        for index, option in enumerate(self.candidates.options[edge.value.name]):
            made.setdefault(option.out, []).append(self.x[edge.value.name, index])
        arriving: dict[tuple[Placement, bool], list[int]] = {key: [] for key in wanted}
        leaving: dict[Placement, list[int]] = {before: [] for before in made}
        for before in made:
            for after, picks in wanted:
                there = self._converted(edge, before, after, picks)
                if there is not None:
                    arriving[after, picks].append(there)
                    leaving[before].append(there)
        for flows, variables in [(arriving[k], wanted[k]) for k in wanted] + [(leaving[k], made[k]) for k in made]:
            self.rows.append(([*flows, *variables], [1.0] * len(flows) + [-1.0] * len(variables), 0.0, 0.0))

    def _converted(self, edge: Edge, before: Placement, after: Placement, picks: bool) -> int | None:
        """Return the flow variable of one reader; several readers share the cost of one conversion."""
        cost = self._conversion_cost(edge.value, before, after, picks, edge.times)
        if cost is None or cost >= self.most:
            return None
        if before == after or self.num_readers[edge] == 1:
            return self._variable(cost, False)
        key = (edge, before, after, picks)
        if key not in self.z:
            self.z[key] = self._variable(cost, False)
        flow = self._variable(0.0, False)
        self.rows.append(([flow, self.z[key]], [1.0, -1.0], -np.inf, 0.0))
        return flow

    def _conversion_cost(
        self, value: fx.Node, before: Placement, after: Placement, picks: bool, times: int
    ) -> float | None:
        if isinstance(value.meta["val"], (tuple, list)) and before != after:
            return None
        how = conversion(
            before,
            after,
            grad=bool(value.meta.get("grad")),
            parameter=bool(value.meta.get("parameter")),
            exchange=is_computed_weight(value, least_dims=2),
        )
        if how is None:
            return None
        size = self.costs.activation[value.name]
        calls = [_MOVED[kind] * size for kind in (how.forward, how.backward) if kind]
        reshards = before != after and (before.is_sharded or (after.is_sharded and not picks))
        along = (value.name, before if before.is_sharded else after) in self.costs.tokens
        is_meant = along or is_computed_weight(value)
        detour = self.weights.reshard if reshards and value.meta.get("grad") and not is_meant else 0.0
        moved = len(calls) * self.weights.call + self.weights.bytes * sum(calls)
        is_made_whole = before.kind == "P" and after.kind in ("I", "R") and value.meta.get("grad")
        kept = self.weights.whole * size if is_made_whole else 0.0  # readers of a sharded value save their shard
        return (detour + moved + kept + (1e-6 if how.name else 0.0)) * times

    def _run(self) -> np.ndarray | None:
        # imported here because a rank that solves nothing saves the 36 MiB of SciPy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        count = len(self.objective)
        data = [(r, c, v) for r, (cols, vals, _, _) in enumerate(self.rows) for c, v in zip(cols, vals, strict=True)]
        row, column, value = (list(t) for t in zip(*data, strict=True))
        matrix = csr_matrix((value, (row, column)), shape=(len(self.rows), count))
        constraints = LinearConstraint(matrix, [r[2] for r in self.rows], [r[3] for r in self.rows])  # pyright: ignore
        result: Any = milp(
            np.array(self.objective),
            constraints=constraints,
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.where(np.array(self.objective) < self.most, 1, 0)),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": 0.0, "time_limit": 120.0},
        )
        return result.x

    def _chosen(self, node: fx.Node, answer: np.ndarray) -> Option:
        options = self.candidates.options[node.name]
        return max(enumerate(options), key=lambda item: answer[self.x[node.name, item[0]]])[1]
