"""Full weights and gradients, if the ranks of dp keep shards of them (zero 2 and 3): seconds and bytes.

forward     zero 3: gathers of the weights of all units but the first beside the products before them
backward    zero 3: the same gathers; the sums of all gradients but those of the last unit beside products
once        with reshard: false the gathers of a step are spread over its microbatches

Units that several blocks read are gathered with the first of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.cost.cut.units import CutWork, HeldParameter
from planner.cost.layout import Layout
from planner.cost.seconds.phases import Pricing, UnitSeconds
from planner.pipeline.schedule import KINDS
from planner.spec.spec import Spec

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
Held = Iterable[tuple[HeldParameter, int]]


class Exchanged:
    """Owns the seconds of the exchanges of each unit."""

    def __init__(self, work: CutWork, layout: Layout, pricing: Pricing, spec: Spec) -> None:
        self._work, self._layout, self._pricing = work, layout, pricing
        self._asked = spec.precision.gradients
        self._gathers = layout.zero == 3
        self._per_microbatch = 1.0 if layout.reshards else 1 / layout.num_microbatches
        self._known: dict[int, tuple[float, float]] = {}

    def beside(self, stage: UnitSeconds, first: int, end: int) -> UnitSeconds:
        """``stage``, of units [first, end), with what its exchanges add to a microbatch."""
        units = [self._of(unit.parameters, id(unit)) for unit in self._work.units[first:end]]
        tied = [(item.held, 1) for item in self._work.tied if item.held is not None and item.is_in(first, end)]
        units.append(self._of(tied, None))
        gathers, sums = [gather for gather, _ in units], [reduced for _, reduced in units]
        gathered, overlap = self._per_microbatch * sum(gathers), self._pricing.cluster.overlap
        alone = self._per_microbatch * max(gathers, default=0.0)
        forward = gathered - overlap * min(gathered - alone, stage.forward.total)
        back = gathered if self._per_microbatch == 1.0 else 0.0
        total, last = back + sum(sums), max(sums, default=0.0)
        computing = stage.backward.total + stage.weights.total
        backward = total - overlap * min(max(0.0, total - last - (alone if back else 0.0)), computing)
        return replace(
            stage,
            forward=replace(stage.forward, dp_comm=stage.forward.dp_comm + forward),
            backward=replace(stage.backward, dp_comm=stage.backward.dp_comm + backward),
        )

    def _of(self, held: Held, key: int | None) -> tuple[float, float]:
        """Seconds of the gather of the weights of a unit, and of the sum of their gradients."""
        if key is not None and key in self._known:
            return self._known[key]
        weights, gradients = bytes_by_axis(held, self._asked)
        gather = sum(self._pricing.collective("all_gather", axis, size) for axis, size in weights.items())
        reduced = sum(self._pricing.collective("reduce_scatter", axis, size) for axis, size in gradients.items())
        found = (gather if self._gathers else 0.0, reduced)
        if key is not None:
            self._known[key] = found
        return found


def bytes_by_axis(held: Held, asked: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of full weights, and of their gradients, by the axis that shares them. ``asked``: dtype of gradients."""
    weights, gradients = dict[str, int](), dict[str, int]()
    for p, count in held:
        weights[p.reduced_over] = weights.get(p.reduced_over, 0) + p.starts * count * p.itemsize
        if p.is_trainable:
            size = SIZES[asked] if asked else max(4, p.itemsize)
            gradients[p.reduced_over] = gradients.get(p.reduced_over, 0) + p.starts * count * size
    return weights, gradients


def whole_bytes(work: CutWork, chunks: Sequence[tuple[int, int]], layout: Layout, asked: str | None) -> int:
    """Bytes of full weights and gradients at once on a rank with these ranges of units; as planner.cost.whole."""
    if layout.zero < 2:
        return 0
    mesh, weights, gradients = layout.mesh, list[int](), list[int]()

    def shared(by_axis: Mapping[str, int]) -> int:
        return sum(size for axis, size in by_axis.items() if mesh.size(axis) > 1)

    for first, end in chunks:
        for unit in work.units[first:end]:
            of_unit = bytes_by_axis(unit.parameters, asked)
            weights.append(shared(of_unit[0]))
            gradients.append(shared(of_unit[1]))
    tied = [(i.held, 1) for i in work.tied if i.held is not None and any(i.is_in(*chunk) for chunk in chunks)]
    tied_weights, tied_gradients = map(shared, bytes_by_axis(tied, asked))
    if KINDS[layout.schedule].waits:
        most = sum(gradients)
    else:
        most = max((a + b for a, b in pairwise(gradients)), default=sum(gradients))
    found = most + tied_gradients
    if layout.zero == 3 and layout.reshards:
        found += max((a + b for a, b in pairwise(weights)), default=sum(weights))
    elif layout.zero == 3:
        found += sum(weights) + tied_weights
    return found
