"""Which layouts there are: every one that the devices, the batch, the model and the spec's own sizes allow.

    tp · cp · pp · dp = devices        no device is left out
    etp · ep divides  tp · cp · dp     experts live on the ranks of a stage
    dp · micro divides batch.global    every rank runs equally many microbatches

A value in the spec is a pin; all others come from here. Outer bounds keep the space finite; the result lists each, and
a pin may exceed it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any, TypeVar

from passes.errors import PlanError
from planner.cost.layout import Layout
from planner.mesh import Mesh
from planner.pipeline.kinds import KINDS, searched_kinds, searched_words
from planner.pipeline.layout import layout_of
from planner.pipeline.schedule import check_schedule, fold_of
from planner.placement.candidates import divisors
from planner.ranks import DEFAULT_ORDER
from planner.spec.fields import AUTO
from planner.spec.spec import Spec

T = TypeVar("T")
DP_OUTSIDE, PP_OUTSIDE = "tp-cp-ep-pp-dp", DEFAULT_ORDER
LEAST_CHUNK = 2048  # tokens of one of the 2·cp chunks of a sequence
MOST_CHUNKS, MOST_MICRO = 8, 64
MOST_NODES = 2  # nodes of a tp group: each further node costs more
BOUNDS = (
    f"tp: at most {MOST_NODES} times the devices of the innermost link",
    f"cp: each of the 2 · cp chunks of a sequence has at least {LEAST_CHUNK} tokens",
    f"vpp: at most {MOST_CHUNKS} chunks per rank",
    f"batch.micro: at most {MOST_MICRO} sequences",
    "etp: tp, or 1",
    f"order: {PP_OUTSIDE}, or {DP_OUTSIDE} if pipelines may lie inside dp groups",
    f"pipeline.schedule: {searched_words()[0]}",
    "optimizer.zero: 1, or more where a layout does not fit with less, without CUDA graphs",
    f"pipeline.schedule: {searched_words()[1]}",
)


SizesOf = Callable[[int, int], Sequence[int]]  # pp, vpp → blocks of each stage


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of the captured model: its repeated blocks, experts of each layer, the longest sequence."""

    num_blocks: int
    num_experts: tuple[int, ...] = ()
    length: int = 0


KINDS_OF_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The choices on which the graph of one stage depends: each is decided once, on the captured model."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def has_expert_axes(self) -> bool:
        """Return whether experts are cut otherwise than all else."""
        return self.ep > 1 or self.etp != self.tp

    def __str__(self) -> str:
        words = [f"tp {self.tp}"]
        words += [f"cp {self.cp}"] * (self.cp > 1)
        words += [f"ep {self.ep}", f"etp {self.etp}"] if self.has_expert_axes else []
        words += ["sequence parallel"] * self.sequence_parallel
        return ", ".join(words)


@dataclass(frozen=True)
class Point:
    """One layout of one cut. ``key`` breaks ties: fewer ranks that wait for each other, then less of everything."""

    cut: Cut
    layout: Layout

    @cached_property
    def key(self) -> tuple[Any, ...]:
        mesh, layout = self.layout.mesh, self.layout
        waits = (mesh.tp * mesh.cp > 1) * mesh.pp * mesh.vpp + (mesh.pp > 1) * mesh.vpp
        return (
            layout.num_microbatches * waits,
            self.cut,
            mesh.pp,
            mesh.vpp,
            KINDS_OF_RECOMPUTE.index(layout.recompute),
            layout.micro,
            layout.zero,
            layout.schedule,
            mesh.order != DEFAULT_ORDER,
            mesh.order,
        )

    @property
    def held(self) -> tuple[float, ...]:
        """Return a key that grows with memory: weights of a rank, then tensors kept of a microbatch."""
        mesh, layout = self.layout.mesh, self.layout
        recompute = -KINDS_OF_RECOMPUTE.index(layout.recompute)
        kept = layout.micro / (mesh.tp * mesh.cp)
        sharded = layout.sequence_parallel
        return -mesh.tp * mesh.pp, -layout.zero, recompute, kept, not sharded, layout.waits, mesh.vpp

    @property
    def choices(self) -> dict[str, Any]:
        """Return the choices, by the names that reasons use; etp only where experts are cut otherwise than all else."""
        mesh, layout = self.layout.mesh, self.layout
        return {
            "tp": mesh.tp,
            "cp": mesh.cp,
            "ep": mesh.ep,
            **({"etp": mesh.etp} if self.cut.has_expert_axes else {}),
            "pp": mesh.pp,
            "vpp": mesh.vpp,
            "dp": mesh.dp,
            "micro": layout.micro,
            "recompute": layout.recompute,
            "zero": layout.zero,
            "sequence parallel": layout.sequence_parallel,
            "schedule": layout.schedule,
            "order": mesh.order,
        }

    def __str__(self) -> str:
        """``tp 8, pp 4 × 2 chunks, dp 2, micro 1, selective recompute``."""
        mesh, layout = self.layout.mesh, self.layout
        words = [str(self.cut), f"pp {mesh.pp}" + f" × {mesh.vpp} chunks" * (mesh.vpp > 1), f"dp {mesh.dp}"]
        words += [f"micro {layout.micro}"]
        words += [f"zero {layout.zero}"] * (layout.zero > 1)
        words += [f"{layout.recompute} recompute"] * (layout.recompute != "none")
        words += [layout.schedule] * (not KINDS[layout.schedule].is_default)
        words += [f"order {mesh.order}"] * (mesh.order != DEFAULT_ORDER)
        return ", ".join(words)


class Space:
    """Owns the sizes that each axis may have, and ``pruned``: how many layouts each reason ruled out."""

    def __init__(self, spec: Spec, devices: int, inner_devices: int, facts: Facts) -> None:
        """``inner_devices``: joined by the innermost link."""
        self.spec, self.devices, self.inner_devices, self.facts = spec, devices, inner_devices, facts
        self.pruned: Counter[str] = Counter()

    def cuts(self) -> Iterator[Cut]:
        """Yield the cuts that devices and pins allow; a later decision shows whether the model allows them."""
        mesh = self.spec.mesh
        most = MOST_NODES * self.inner_devices
        for tp in self._sizes(mesh.tp, [n for n in divisors(self.devices) if n <= most]):
            for cp in self._sizes(mesh.cp, self._of_sequence()):
                for ep in self._sizes(mesh.ep, self._of_experts()):
                    for etp in self._etp(tp):
                        yield from self._with_sequence(tp, cp, ep, etp)

    def points(self, cut: Cut, sizes_of: SizesOf) -> Iterator[Point]:
        inner = cut.tp * cut.cp
        pipelines = self._sizes(
            self.spec.mesh.pp, [n for n in divisors(self.devices) if n <= max(1, self.facts.num_blocks)]
        )
        for pp in pipelines:
            if self.spec.pipeline.split == AUTO and pp > max(1, self.facts.num_blocks):
                self.pruned[f"pp {pp}: the model has {self.facts.num_blocks} blocks"] += 1
            elif self.devices % (inner * pp) == 0:
                dp = self.devices // (inner * pp)
                if self.spec.mesh.dp in (AUTO, dp):
                    yield from self._of_mesh(cut, pp, dp, sizes_of)

    def _sizes(self, given: Any, allowed: Sequence[T]) -> Sequence[T]:
        return allowed if given == AUTO else [given]

    def _of_sequence(self) -> list[int]:
        length = self.facts.length
        return [
            n for n in divisors(self.devices) if n == 1 or (length % (2 * n) == 0 and length >= 2 * n * LEAST_CHUNK)
        ]

    def _of_experts(self) -> list[int]:
        common = gcd(*self.facts.num_experts) if self.facts.num_experts else 1
        return [n for n in divisors(common) if self.devices % n == 0]

    def _etp(self, tp: int) -> list[int]:
        given = self.spec.mesh.etp
        if given is None or (given == AUTO and not self.facts.num_experts):
            return [tp]
        return sorted({tp, 1}) if given == AUTO else [int(given)]

    def _with_sequence(self, tp: int, cp: int, ep: int, etp: int) -> Iterator[Cut]:
        if self.devices % (tp * cp) or self.devices % (etp * ep):
            return
        given = self.spec.tensor_parallel.sequence_parallel
        for sequence_parallel in (False, True) if given == AUTO else (given,):
            if not (sequence_parallel and tp == 1 and given == AUTO):
                yield Cut(tp, bool(sequence_parallel), cp, ep, etp)

    def _of_mesh(self, cut: Cut, pp: int, dp: int, sizes_of: SizesOf) -> Iterator[Point]:
        size = self.spec.batch.global_size
        if size % dp:
            self.pruned[f"dp {dp} does not divide batch.global = {size}"] += 1
            return
        if (cut.tp * cut.cp * dp) % (cut.etp * cut.ep):
            self.pruned["etp · ep does not divide the ranks of a stage"] += 1
            return
        for vpp in self._vpp(pp):
            sizes = self._stages(pp, vpp, sizes_of)
            for order in self._orders(cut, pp, dp):
                mesh = self._mesh(cut, pp, dp, vpp, order)
                if mesh is not None and sizes is not None:
                    yield from self._of_batch(cut, mesh, tuple(sizes))

    def _vpp(self, pp: int) -> Sequence[int]:
        most = min(MOST_CHUNKS, self.facts.num_blocks // pp) if pp > 1 else 1
        return self._sizes(self.spec.mesh.vpp, range(1, max(1, most) + 1))

    def _stages(self, pp: int, vpp: int, sizes_of: SizesOf) -> Sequence[int] | None:
        split = self.spec.pipeline.split
        if split == AUTO:
            if pp * vpp <= max(1, self.facts.num_blocks):
                return sizes_of(pp, vpp)
            self.pruned[f"pp · vpp = {pp * vpp}: the model has {self.facts.num_blocks} blocks"] += 1
            return None
        try:
            return layout_of(split, pp, vpp, self.facts.num_blocks, fold_of(self.spec.pipeline.schedule)).sizes
        except PlanError as error:
            self.pruned[error.what] += 1
            return None

    def _orders(self, cut: Cut, pp: int, dp: int) -> Sequence[str]:
        matters = pp > 1 and dp > 1 and self.devices > self.inner_devices and cut.cp == 1 and not cut.has_expert_axes
        return self._sizes(self.spec.mesh.order, (PP_OUTSIDE, DP_OUTSIDE) if matters else (PP_OUTSIDE,))

    def _mesh(self, cut: Cut, pp: int, dp: int, vpp: int, order: str) -> Mesh | None:
        try:
            return Mesh(tp=cut.tp, pp=pp, vpp=vpp, dp=dp, cp=cut.cp, ep=cut.ep, etp=cut.etp, order=order)
        except PlanError as error:
            self.pruned[error.what] += 1
            return None

    def _of_batch(self, cut: Cut, mesh: Mesh, sizes: tuple[int, ...]) -> Iterator[Point]:
        rows = self.spec.batch.global_size // mesh.dp
        for micro in self._sizes(self.spec.batch.micro, [n for n in divisors(rows) if n <= MOST_MICRO]):
            if rows % micro:
                self.pruned[f"batch.micro = {micro} does not divide the {rows} sequences of a dp rank"] += 1
                continue
            for schedule in self._schedules(mesh, rows // micro):
                laid = replace(mesh, fold=fold_of(schedule))
                for recompute, zero in product(self._recompute(), self._zero(mesh)):
                    reshards = self.spec.optimizer.reshard is not False
                    chosen = (cut.sequence_parallel, recompute, schedule, sizes, zero, reshards)
                    yield Point(cut, Layout(laid, micro, rows // micro, *chosen))

    def _schedules(self, mesh: Mesh, num_microbatches: int) -> Iterator[str]:
        kinds = searched_kinds(mesh.pp, mesh.vpp, may_wait=self.spec.cuda_graphs.impl == "none")  # no W inside of them
        for schedule in self._sizes(self.spec.pipeline.schedule, kinds):
            try:
                check_schedule(schedule, mesh.pp, num_microbatches, mesh.vpp, self.spec.pipeline.group_size)
                yield schedule
            except PlanError as error:
                self.pruned[f"{schedule}: {_without_numbers(error)}"] += 1

    def _recompute(self) -> Sequence[str]:
        has_none = not self.facts.num_blocks or self.spec.cuda_graphs.impl == "transformer_engine"
        return self._sizes(self.spec.recompute, ("none",) if has_none else KINDS_OF_RECOMPUTE)

    def _zero(self, mesh: Mesh) -> Sequence[int]:
        may_share = mesh.size(mesh.data_axis) > 1 and self.spec.cuda_graphs.impl == "none"
        return self._sizes(self.spec.optimizer.zero, (1, 2, 3) if may_share else (1,))


def _without_numbers(error: PlanError) -> str:
    """Return one reason for all sizes: which kinds of sizes do not fit one another, without numbers."""
    words = {
        "batch.global": "too few microbatches for its groups, or too many actions",
        "mesh.vpp": "it needs several chunks on several ranks",
    }
    return words.get(str(error.where), error.what)
