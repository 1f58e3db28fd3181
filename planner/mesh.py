"""Which rank is where: the axes of the device mesh, rank ↔ coordinate, and the rank groups of every axis.

    dense    rank = tp + cp·TP + dp·TP·CP + pp·TP·CP·DP             attention and everything that is not an expert
    expert   rank = etp + ep·ETP + edp·ETP·EP + pp·ETP·EP·EDP       the expert MLPs, over the same ranks

for the order ``tp-cp-ep-dp-pp``; another order permutes the strides (the leftmost axis has stride 1, so it stays inside
a node). The groups of an axis hold the ranks that differ only in that axis: an offset for each of its members, added to
a base for each position of the other axes. Nothing here needs more than integers, so 16,384 ranks take milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from planner.errors import PlanError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_TOKENS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")
EXPERT_TOKENS = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp", "ep-dp")


def masked_groups(sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """The groups over the axes where ``mask`` is true; axis 0 has stride 1. Groups and members ascend in rank."""
    strides = _strides(sizes)
    members = _offsets((n, s) for n, s, inside in zip(sizes, strides, mask, strict=True) if inside)
    bases = _offsets((n, s) for n, s, inside in zip(sizes, strides, mask, strict=True) if not inside)
    return [[base + offset for offset in members] for base in bases]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[:axis]) for axis in range(len(sizes))]


def _offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Every sum of i·stride over ``axes``, pairs (size, stride), the first axis running fastest."""
    offsets = [0]
    for size, stride in axes:
        offsets = [offset + i * stride for i in range(size) for offset in offsets]
    return offsets


@dataclass(frozen=True, slots=True)
class RankGenerator:
    """One way to lay named axes over the ranks: ``axes[0]`` has stride 1. Raises PlanError when ep and cp meet."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        size = dict(zip(self.axes, self.sizes, strict=True))
        if size.get("cp", 1) > 1 and size.get("ep", 1) > 1:
            raise PlanError(
                f"cp = {size['cp']} and ep = {size['ep']} stand in one rank generator",
                where="mesh",
                fix="cp belongs to the dense generator and ep to the expert one: describe both axes with one Mesh",
            )

    @classmethod
    def of(cls, order: str, sizes: Mapping[str, int], owner: str = "") -> RankGenerator:
        """The axes of ``sizes`` in the order named; one of size 1 may be missing there. ``owner`` is for the error."""
        named = [axis for axis in order.split("-") if axis in sizes]
        missing = [axis for axis in sizes if axis not in named]
        for axis in missing:
            if sizes[axis] > 1:
                raise _missing_axis(order, axis, sizes[axis], owner)
        axes = (*named, *missing)
        return cls(axes, tuple(sizes[axis] for axis in axes))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def stride(self, axis: str) -> int:
        """How far apart neighbours along ``axis`` are."""
        return _strides(self.sizes)[self.axes.index(axis)]

    def mask(self, token: str) -> list[bool]:
        """Which axes ``token`` names, such as ``tp`` or ``dp-cp``."""
        chosen = token.lower().split("-")
        for axis in chosen:
            if axis not in self.axes:
                raise _unknown_axis(axis, self.axes, f"group `{token}`")
        return [axis in chosen for axis in self.axes]

    def groups(self, token: str) -> list[list[int]]:
        return masked_groups(self.sizes, self.mask(token))

    def group_of(self, token: str, rank: int) -> list[int]:
        """The one group of ``token`` that holds ``rank``, without making the others."""
        mask, strides, coordinate = self.mask(token), _strides(self.sizes), self.coordinate(rank)
        base = rank - sum(coordinate[a] * s for a, s, inside in zip(self.axes, strides, mask, strict=True) if inside)
        inside = ((n, s) for n, s, chosen in zip(self.sizes, strides, mask, strict=True) if chosen)
        return [base + offset for offset in _offsets(inside)]

    def coordinate(self, rank: int) -> dict[str, int]:
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        return {a: rank // s % n for a, n, s in zip(self.axes, self.sizes, _strides(self.sizes), strict=True)}

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """The rank at ``coordinate``; an axis left out is 0."""
        assert all(0 <= i < self.sizes[self.axes.index(axis)] for axis, i in coordinate.items()), coordinate
        return sum(coordinate.get(axis, 0) * s for axis, s in zip(self.axes, _strides(self.sizes), strict=True))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The sizes of all axes and their order; world size = tp·cp·dp·pp = etp·ep·edp·pp.

    ``etp`` left out (0) is the same as tp. The order is case-insensitive and kept in lower case. Raises PlanError, with
    the spec's key as its place, when the sizes do not fit one another or the order does not hold every axis.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.etp or self.tp)
        object.__setattr__(self, "order", self.order.lower())
        _check_sizes(self)
        _check_order(self.order)
        _check_vpp(self)
        _check_divisible(self.world_size, "etp·ep·pp", (self.etp, self.ep, self.pp))
        _check_same_pp(self, self.dense, self.expert)

    @classmethod
    def from_world_size(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> Mesh:
        """The mesh over ``world_size`` ranks whose dp is what the other axes leave. Raises PlanError when none fits."""
        given = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": tp if etp is None else etp, "vpp": vpp}
        for axis, size in {"world size": world_size, **given}.items():
            _check_size(axis, size)
        _check_divisible(world_size, "tp·cp·pp", (tp, cp, pp))
        return cls(dp=world_size // (tp * cp * pp), order=order, **given)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts: what etp, ep and pp leave."""
        return self.world_size // (self.etp * self.ep * self.pp)

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

    def coordinate(self, rank: int) -> dict[str, int]:
        """``rank``'s place on each dense axis: {"tp", "cp", "dp", "pp"}."""
        return self.dense.coordinate(rank)

    def expert_coordinate(self, rank: int) -> dict[str, int]:
        """``rank``'s place on each expert axis: {"tp" (etp), "ep", "dp" (edp), "pp"}."""
        return self.expert.coordinate(rank)

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at a dense coordinate."""
        return self.dense.rank_of({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def groups(self, token: str) -> list[list[int]]:
        """All groups over the dense axes that ``token`` names, such as ``tp`` or ``dp-cp``."""
        return self.dense.groups(token)

    def expert_groups(self, token: str) -> list[list[int]]:
        """All groups over the expert axes that ``token`` names; there ``tp`` is etp and ``dp`` is edp."""
        return self.expert.groups(token)

    def group_of(self, token: str, rank: int) -> list[int]:
        """The dense group of ``token`` that holds ``rank``."""
        return self.dense.group_of(token, rank)


def all_groups(mesh: Mesh) -> dict[str, dict[str, list[list[int]]]]:
    """Every group of both generators, as ``meshwright groups --format json`` prints them."""
    dense, expert = mesh.dense, mesh.expert
    return {
        "dense": {token: dense.groups(token) for token in DENSE_TOKENS},
        "expert": {token: expert.groups(token) for token in EXPERT_TOKENS},
    }


def _check_sizes(mesh: Mesh) -> None:
    for axis in ("tp", "pp", "dp", "vpp", "cp", "ep", "etp"):
        _check_size(axis, getattr(mesh, axis))


def _check_size(axis: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            f"{axis} = {size!r} is not a positive whole number",
            where="mesh" if axis == "world size" else f"mesh.{axis}",
            fix=f"give {axis} as 1, 2, 3, …",
        )


def _check_order(order: str) -> None:
    axes = order.split("-")
    for axis in axes:
        if axis not in AXES:
            raise _unknown_axis(axis, AXES, f"order `{order}`")
        if axes.count(axis) > 1:
            raise PlanError(
                f"order `{order}` names the axis {axis} more than once",
                where="mesh.order",
                fix=f"name each axis once, as in {DEFAULT_ORDER}",
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
            fix=f"choose sizes whose product divides {world_size}, or launch a multiple of {product} ranks",
        )


def _check_same_pp(mesh: Mesh, dense: RankGenerator, expert: RankGenerator) -> None:
    """A stage is one set of ranks, so both generators must put pp at the same place.

    An order that ends in pp always does. Any other order does so only if what stands left of pp is equally large in
    both. Where that holds by chance, with dp unlike edp, it is refused too: another tp or ep would break it.
    """
    if mesh.pp == 1 or mesh.order.endswith("pp"):
        return
    dense_stride, expert_stride = dense.stride("pp"), expert.stride("pp")
    fix = f"end the order in pp, for example {DEFAULT_ORDER}"
    if dense_stride != expert_stride:
        raise PlanError(
            f"order `{mesh.order}` puts neighbouring pipeline stages {dense_stride} ranks apart for the dense layers, "
            f"but {expert_stride} apart for the experts: the pp groups differ",
            where="mesh.order",
            fix=fix,
        )
    if mesh.dp != mesh.edp:
        raise PlanError(
            f"order `{mesh.order}` does not end in pp, which needs dp (= {mesh.dp}) and edp (= {mesh.edp}) to be equal",
            where="mesh.order",
            fix=fix,
        )


def _missing_axis(order: str, axis: str, size: int, owner: str) -> PlanError:
    return PlanError(
        f"order `{order}` leaves out the axis {axis}, whose size is {size}" + (f" for the {owner}" if owner else ""),
        where="mesh.order",
        fix=f"use {order}-pp" if axis == "pp" else f"add {axis} to the order, as in {DEFAULT_ORDER}",
    )


def _unknown_axis(axis: str, known: Sequence[str], place: str) -> PlanError:
    nearest = get_close_matches(axis, known, n=1)
    fix = (f"did you mean {nearest[0]}? " if nearest else "") + f"known: {', '.join(known)}"
    return PlanError(f"{place} names an unknown axis `{axis}`", where="mesh.order", fix=fix)
