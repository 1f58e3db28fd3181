"""Seconds of the end of a step: gradients over dp, tied weights, norm, update, all-gather of parameters.

reduce-scatter   bucket by bucket, as the rank's last backward fills them (runtime.optimizer.buffers); all but the last
                 bucket overlap that backward
update           bytes of gradient, moments and parameters over the memory bandwidth; for whole matrices also the
                 products of Newton-Schulz, evenly over the ranks that share them, and two all-to-alls
all-gather       starts after the update; each forward waits for the buckets that it reads; all but the first bucket
                 overlap the first forward, or the wait of a later stage for its first microbatch

With zero 2 and 3, sharded weights and gradients are exchanged in each microbatch:

forward     zero 3: all-gathers of all units but the first overlap the products before them
backward    zero 3: the same all-gathers; reduce-scatters of all units but the last overlap products
once        with reshard: false the all-gathers of a step are spread over its microbatches

Weights that several blocks read are gathered with the first unit of a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.cut.units import CutWork, Op, Size
from planner.cost.layout import Layout
from planner.cost.seconds.buffers import Held, HeldBuffer, RankHolds, bytes_by_axis
from planner.cost.seconds.phases import Pricing, Spent, UnitSeconds
from planner.sharding.homes import SENT_BYTES
from planner.sharding.shards import NOTES_OF_A_RANK, SUMS
from planner.spec.spec import Spec
from planner.spec.update_rules import NEWTON_SCHULZ_STEPS

NORM_BYTES = 8


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """Seconds of one rank: from its last backward to the norm (``reduce``), of the update, and of the exposed
    all-gather of parameters.
    """

    reduce: float
    update: float
    gather: float


def end_of_step(
    holds: RankHolds, pricing: Pricing, *, zero: int, last_backward: float, until_first_forward_ends: float
) -> EndOfStep:
    """Return the seconds of a rank after its last backward, which took ``last_backward`` seconds.
    ``until_first_forward_ends``: seconds from the start of a step."""
    overlap = pricing.cluster.overlap
    reduce = gather = sums = update = 0.0
    last_bucket = first_bucket = 0.0
    for buffer in holds.buffers:
        if zero < 2:  # with zero 2 and 3, gradients are reduced during the backwards (Exchanged)
            kind = "reduce_scatter" if zero else "all_reduce"
            each = pricing.collective(kind, buffer.reduced_over, _bucket(buffer) * buffer.gradient_itemsize)
            reduce += buffer.num_buckets * each
            last_bucket = max(last_bucket, each)
        if zero in (1, 2):
            each = pricing.collective("all_gather", buffer.reduced_over, _bucket(buffer) * buffer.itemsize)
            gather += buffer.num_buckets * each
            first_bucket = max(first_bucket, each)
        sums += _sums(buffer, pricing)
        update += pricing.roofline.moving(buffer.update_bytes) + _matrices(buffer, pricing)
    hidden = overlap * min(reduce - last_bucket, last_backward)
    waited = gather - overlap * min(gather - first_bucket, until_first_forward_ends)
    return EndOfStep(reduce - hidden + sums, update, waited)


def _matrices(buffer: HeldBuffer, pricing: Pricing) -> float:
    if not buffer.matrices:
        return 0.0
    seconds = elements = 0.0
    for count, *shape in buffer.matrices:
        a, b = sorted(shape)
        products = ((1, a, a, b), (1, a, a, a), (1, a, b, a))
        moved = ((sides, 2.0 * (m * n + m * k + k * n)) for sides in products for _, m, n, k in [sides])
        ops = [(Op("bfloat16", Size(size), sides), 1) for sides, size in moved]
        each = max(pricing.roofline.all(ops, 1), pricing.roofline.host(ops))
        seconds += count * NEWTON_SCHULZ_STEPS * each
        elements += count * a * b
    if not buffer.shared_by:
        return seconds
    ranks = pricing.mesh.size(buffer.shared_by)
    exchange = pricing.collective("all_to_all", buffer.shared_by, elements * SENT_BYTES / ranks / buffer.num_buckets)
    return seconds / ranks + 2 * buffer.num_buckets * exchange


def _bucket(buffer: HeldBuffer) -> float:
    return buffer.elements / buffer.num_buckets


def _sums(buffer: HeldBuffer, pricing: Pricing) -> float:
    """Return the seconds of all-reduces of this rank's shard: over axes with partial gradients, and of tied weights."""
    size = buffer.shard * buffer.main_itemsize
    axes: Sequence[str] = [axis for axis in SUMS if axis in buffer.partial_over]
    total = sum(pricing.collective("all_reduce", axis, size) for axis in axes)
    if buffer.tied and pricing.mesh.pp > 1:
        total += pricing.collective("all_reduce", "pp", size)
    return total


def norm_seconds(pricing: Pricing, num_noted: int) -> float:
    """Return the seconds of the norm's all-reduce over all ranks."""
    size = NORM_BYTES * (3 + num_noted + NOTES_OF_A_RANK * pricing.mesh.world_size)
    return pricing.collective("all_reduce", "world", size) if pricing.mesh.world_size > 1 else 0.0


class Exchanged:
    """The seconds of the all-gathers and reduce-scatters of each unit, with zero 2 and 3."""

    def __init__(self, work: CutWork, layout: Layout, pricing: Pricing, spec: Spec) -> None:
        self._work, self._layout, self._pricing = work, layout, pricing
        self._asked = spec.precision.gradients
        self._gathers = layout.zero == 3
        self._per_microbatch = 1.0 if layout.reshards else 1 / layout.num_microbatches
        self._known: dict[int, tuple[float, float]] = {}

    def beside(self, stage: UnitSeconds, first: int, end: int) -> UnitSeconds:
        """Return the seconds of ``stage``, of units [first, end), with the exposed time of these collectives."""
        units = [self._of(unit.parameters, id(unit)) for unit in self._work.units[first:end]]
        tied = [(item.held, 1) for item in self._work.shared if item.held is not None and item.is_in(first, end)]
        units.append(self._of(tied, None))
        gathers, sums = [gather for gather, _ in units], [reduced for _, reduced in units]
        gathered, overlap = self._per_microbatch * sum(gathers), self._pricing.cluster.overlap
        alone = self._per_microbatch * max(gathers, default=0.0)
        forward = gathered - overlap * min(gathered - alone, stage.forward.total)
        back = gathered if self._per_microbatch == 1.0 else 0.0
        total, last = back + sum(sums), max(sums, default=0.0)
        computing = stage.backward.total + stage.weights.total
        backward = total - overlap * min(max(0.0, total - last - (alone if back else 0.0)), computing)
        added = Spent(dp_comm=forward), Spent(dp_comm=backward), Spent()
        return stage.plus(UnitSeconds(*added))

    def _of(self, held: Held, key: int | None) -> tuple[float, float]:
        """Return the seconds of a unit's all-gather of weights and reduce-scatter of gradients, cached by ``key``."""
        if key is not None and key in self._known:
            return self._known[key]
        weights, gradients = bytes_by_axis(held, self._asked)
        gather = sum(self._pricing.collective("all_gather", axis, size) for axis, size in weights.items())
        reduced = sum(self._pricing.collective("reduce_scatter", axis, size) for axis, size in gradients.items())
        seconds = (gather if self._gathers else 0.0, reduced)
        if key is not None:
            self._known[key] = seconds
        return seconds
