"""The device mesh: the sizes of all axes, and the coordinates of each rank, for the dense layers and for the experts.

    dense    rank = tp + cp·TP + dp·TP·CP + pp·TP·CP·DP             attention and everything that is not an expert
    expert   rank = etp + ep·ETP + edp·ETP·EP + pp·ETP·EP·EDP       the expert MLPs, over the same ranks

The formulas are those of the order ``tp-cp-ep-dp-pp``; another order permutes the strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from passes.errors import PlanError, require
from planner import fold as folds
from planner.fold import LOOP, Fold
from planner.ranks import DEFAULT_ORDER, DENSE_TOKENS, EXPERT_TOKENS, RankGenerator, check_order

MOST_RANKS = 1 << 20
SIZES = ("tp", "pp", "dp", "vpp", "cp", "ep", "etp")
EXPERT_AXES = {"ep": "ep", "etp": "tp", "edp": "dp"}  # axis of a plan → its name in the generator of experts
SHARD, REPLICA = "shard", "replica"  # the data axis in two: within a group of shards, and between the groups
OF_WEIGHTS = " of weights"  # suffix of an axis: a second process group of its ranks, for gathers of sharded weights
BETWEEN_NODES, IN_A_NODE = "ep between nodes", "ep in a node"  # the two steps of a dispatch over several nodes
BY_ROUTING = ("ep", "etp", BETWEEN_NODES, IN_A_NODE)  # axes over which rows travel to experts


@dataclass(frozen=True, slots=True)
class Mesh:
    """The sizes of all axes and their order; world_size = tp·cp·dp·pp = etp·ep·edp·pp. A plan has it as a row.

    ``etp`` 0: the same as tp; ``edp`` and ``world_size`` 0: computed from the other sizes. ``order``: in any case,
    stored in lower case. ``fold``: which of the pp·vpp stages each pp rank runs. ``shard``: number of adjacent ranks
    of the data axis that shard dense parameters among them; 0: all ranks of the axis. Raises PlanError at the key of
    the spec if sizes contradict each other, or the order lacks an axis.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    edp: int = 0
    world_size: int = 0
    order: str = DEFAULT_ORDER
    fold: Fold = LOOP
    shard: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.etp or self.tp)
        object.__setattr__(self, "order", self.order.lower())
        for axis in SIZES:
            _check_size(axis, getattr(self, axis))
        check_order(self.order)
        _check_vpp(self)
        if self.tp * self.cp * self.dp * self.pp > MOST_RANKS or self.pp * self.vpp > MOST_RANKS:
            raise _too_many("world size")
        self._fill("world_size", "tp·cp·dp·pp", self.tp * self.cp * self.dp * self.pp)
        _check_divisible(self.world_size, "etp·ep·pp", (self.etp, self.ep, self.pp))
        self._fill("edp", "world_size / (etp·ep·pp)", self.world_size // (self.etp * self.ep * self.pp))
        _check_same_pp(self, self.dense, self.expert)
        _check_shard(self)

    def _fill(self, name: str, formula: str, size: int) -> None:
        """Set ``name`` to ``size``; a value that is set already (in a saved plan) must be equal."""
        stored = getattr(self, name)
        require(stored in (0, size), f"{formula} = {size}, {name} = {stored}")
        object.__setattr__(self, name, size)

    @classmethod
    def from_world_size(cls, world_size: int, *, order: str = DEFAULT_ORDER, **sizes: Any) -> Mesh:
        """Return the mesh of ``world_size`` ranks with these ``sizes`` (etp None: that of tp), and dp from the rest.
        Raises PlanError if the sizes do not divide ``world_size``."""
        given = dict[str, Any](tp=1, pp=1, cp=1) | {axis: size for axis, size in sizes.items() if size is not None}
        for axis, size in {"world size": world_size, **given}.items():
            _check_size(axis, size)
        used = given["tp"], given["cp"], given["pp"]
        _check_divisible(world_size, "tp·cp·pp", used)
        return cls(dp=world_size // math.prod(used), order=order, **given)

    @property
    def dense(self) -> RankGenerator:
        """Axes tp, cp, dp, pp: attention and everything that is not an expert."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return RankGenerator.of(self.order, sizes, "dense layers")

    @property
    def expert(self) -> RankGenerator:
        """Axes tp (= etp), ep, dp (= edp), pp: the expert MLPs."""
        sizes = {"tp": self.etp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return RankGenerator.of(self.order, sizes, "experts")

    @property
    def has_expert_axes(self) -> bool:
        """Whether experts are sharded over axes of their own: over ep, or over an etp that differs from tp."""
        return self.ep > 1 or self.etp != self.tp

    def pp_rank_of(self, stage: int) -> int:
        return folds.rank_of(stage, self.pp, self.fold)

    def chunk_of(self, stage: int) -> int:
        return stage // self.pp

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pp rank, chunk by chunk."""
        return folds.stages_of(pp_rank, self.pp, self.pp * self.vpp, self.fold)

    @property
    def data_axis(self) -> str:
        """The ranks that hold the same dense parameters and run other tokens: "dp", or "dp-cp" if cp > 1."""
        return "dp-cp" if self.cp > 1 else "dp"

    @property
    def replica(self) -> int:
        """The number of groups of ``shard`` ranks, each with all dense parameters."""
        return self.size(self.data_axis) // self.shard if self.shard else 1

    @property
    def shared_axis(self) -> str:
        """The axis over which dense parameters are sharded (ZeRO)."""
        return SHARD if self.replica > 1 else self.data_axis

    def size(self, axis: str) -> int:
        """Return the size of an axis (tp, cp, dp, pp, etp, ep, edp), or of several, such as dp-cp."""
        return math.prod(getattr(self, name) for name in axis.split("-"))

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on each axis of both generators: {"tp", "cp", "dp", "pp", "etp", "ep", "edp"}.

        If cp > 1, also on "dp-cp"; with several groups of shards, also on "shard" and "replica".
        """
        expert = self.expert.coordinate(rank)
        place = {**self.coordinate(rank), "etp": expert["tp"], "ep": expert["ep"], "edp": expert["dp"]}
        place |= {"dp-cp": self.dense.index_in("dp-cp", rank)} if self.cp > 1 else {}
        if self.replica > 1:
            place[REPLICA], place[SHARD] = divmod(place[self.data_axis], self.shard)
        return place

    def shown_place(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on the axes that messages show: tp, pp, dp, and cp if cp > 1."""
        coordinate = self.coordinate(rank)
        return {axis: coordinate[axis] for axis in ("tp", "cp", "pp", "dp") if axis != "cp" or self.cp > 1}

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on each dense axis: {"tp", "cp", "dp", "pp"}."""
        return self.dense.coordinate(rank)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return self.dense.rank_of({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def groups(self, token: str) -> list[list[int]]:
        """Return all groups over the dense axes in ``token``, such as ``tp`` or ``dp-cp``."""
        return self.dense.groups(token)

    def groups_over(self, axis: str) -> list[list[int]]:
        """Return all groups over the axes of a plan in ``axis``, such as ``tp-dp`` or ``etp-edp``."""
        axis = axis.removesuffix(OF_WEIGHTS)
        if axis in (SHARD, REPLICA):
            return [part for ranks in self.groups(self.data_axis) for part in self.parts_of(axis, ranks)]
        return self.generator_of(axis).groups(token_of(axis))

    def generator_of(self, axis: str) -> RankGenerator:
        """Return the generator of an axis of a plan: of the experts for ``etp``, ``ep`` and ``edp``, else the dense."""
        return self.expert if axis.partition("-")[0] in EXPERT_AXES else self.dense

    def parts_of(self, axis: str, ranks: list[int]) -> list[list[int]]:
        """Split ``ranks`` of the data axis into groups that shard parameters ("shard"), or have equal shards."""
        if axis == SHARD:
            return [ranks[first : first + self.shard] for first in range(0, len(ranks), self.shard)]
        return [ranks[first :: self.shard] for first in range(self.shard)]


def token_of(axis: str) -> str:
    """Return the name in its generator of one or several axes of a plan: ``etp-edp`` → ``tp-dp``."""
    return "-".join(EXPERT_AXES.get(name, name) for name in axis.split("-"))


def all_groups(mesh: Mesh) -> dict[str, dict[str, list[list[int]]]]:
    """Return every group of both generators, as ``meshwright groups --format json`` prints them."""
    dense, expert = mesh.dense, mesh.expert
    return {
        "dense": {token: dense.groups(token) for token in DENSE_TOKENS},
        "expert": {token: expert.groups(token) for token in EXPERT_TOKENS},
    }


def _check_size(axis: str, size: object) -> None:
    if isinstance(size, int) and size > MOST_RANKS:
        raise _too_many(axis)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"{axis} = {size!r} is not a positive whole number",
            where="mesh" if axis == "world size" else f"mesh.{axis}",
            fix=f"give {axis} as 1, 2, 3, …",
        )


def _too_many(axis: str) -> PlanError:
    return PlanError(
        f"{axis} is more than {MOST_RANKS}, the maximum number of ranks",
        where="mesh" if axis == "world size" else f"mesh.{axis}",
        fix="check the number of digits",
    )


def _check_vpp(mesh: Mesh) -> None:
    if mesh.vpp > 1 and mesh.pp == 1:
        raise PlanError(
            f"vpp = {mesh.vpp} splits each pipeline rank into chunks, but there is no pipeline (pp = 1)",
            where="mesh.vpp",
            fix="set vpp to 1, or pp to 2 or more",
        )


def _check_divisible(world_size: int, name: str, sizes: tuple[int, ...]) -> None:
    product = math.prod(sizes)
    if world_size % product:
        values = "·".join(map(str, sizes))
        raise PlanError(
            f"world size {world_size} is not divisible by {name} = {values} = {product}",
            where="mesh",
            fix=f"choose sizes with a product that divides {world_size}, or launch a multiple of {product} ranks",
        )


def _check_shard(mesh: Mesh) -> None:
    ranks = mesh.size(mesh.data_axis)
    if mesh.shard and ranks % mesh.shard:
        raise PlanError(
            f"groups of {mesh.shard} ranks do not divide the {ranks} ranks of {mesh.data_axis} that share parameters",
            where="optimizer.shard_group",
            fix=f"choose a divisor of {ranks}",
        )


def _check_same_pp(mesh: Mesh, dense: RankGenerator, expert: RankGenerator) -> None:
    """Raise PlanError unless both generators give every stage the same ranks.

    An order that ends in pp always does. Any other order does only if the axes left of pp have the same product in
    both. If that holds by coincidence, with dp unlike edp, it is refused too: another tp or ep would break it.
    """
    if mesh.pp == 1 or mesh.order.endswith("pp"):
        return
    dense_stride, expert_stride = dense.stride("pp"), expert.stride("pp")
    fix = f"end the order in pp, for example {DEFAULT_ORDER}"
    if dense_stride != expert_stride:
        raise PlanError(
            f"order `{mesh.order}` puts adjacent pipeline stages {dense_stride} ranks apart for the dense layers, "
            f"but {expert_stride} apart for the experts: the pp groups differ",
            where="mesh.order",
            fix=fix,
        )
    if mesh.dp != mesh.edp:
        raise PlanError(
            f"order `{mesh.order}` does not end in pp, so that dp (= {mesh.dp}) and edp (= {mesh.edp}) must be equal",
            where="mesh.order",
            fix=fix,
        )
