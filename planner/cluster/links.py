"""The links that a group of ranks uses, and the seconds of a collective over them.

A group that spans several levels works level by level, as in NCCL: of n ranks, n₀ are in one node, n₁ nodes in one
rack, and so on (n = n₀·n₁·…). B: bytes of the full tensor. At level l, a device moves B_l = B / (n₀·…·n_{l-1}) of it,
because the members inside share the work. w: bandwidth · fraction of a device, or the measured rate for this tensor
size and number of parts; t: latency of a message.

    reduce-scatter, all-gather      Σ_l  (n_l − 1)·t_l + (n_l − 1)/n_l · B_l / w_l                 ring
    all-reduce                      twice that; or, for small messages,
                                    Σ_l  2·⌈log₂ n_l⌉·t_l + 2 · B_l / w_l                          tree
    all-to-all                      Σ_l  (peers behind level l)·t_l + B · (peers behind level l)/n / w_l
    send                            t_l + B / w_l                          l: the level where both ends meet

(Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Sanders, Speck,
Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan". The levels: Cho et al. 2019,
"BlueConnect".) The bandwidth of a link is per device: groups in one node do not slow each other down, and a group uses
the shares of its own members only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, log, log2, prod
from operator import mul

from planner.cluster.cluster import Cluster
from planner.mesh import BETWEEN_NODES, IN_A_NODE, REPLICA, SHARD, Mesh, token_of
from planner.ranks import RankGenerator

Group = tuple[int, ...]  # for each level of links, the number of parts of the level below that a group joins


@dataclass(frozen=True, slots=True)
class Wire:
    """One level of links as a device sees it: ``latency`` in seconds, reached ``bandwidth`` in bytes per second.

    ``reduce_scatter``: its duration relative to a ring. ``sizes``: (bytes of the tensor, bandwidth); ``parts``: (number
    of parts that a group joins here, factor on its bandwidth). Values between two points follow a power law.
    """

    latency: float
    bandwidth: float
    reduce_scatter: float = 1.0
    sizes: tuple[tuple[float, float], ...] = ()
    parts: tuple[tuple[float, float], ...] = ()

    def rate(self, num_bytes: float, parts: int) -> float:
        """Return the bytes per second of a device when ``parts`` exchange a tensor of ``num_bytes``."""
        bandwidth = _between(self.sizes, num_bytes) if self.sizes else self.bandwidth
        return bandwidth * _between(self.parts, parts) if self.parts else bandwidth


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate the value at ``at``; constant beyond the first and the last point."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if at < high:
            return first * (last / first) ** (log(at / low) / log(high / low))
    return points[-1][1]


def wires(cluster: Cluster, slower: float = 1.0) -> tuple[Wire, ...]:
    """Return the levels, from the inside outwards. ``slower``: factor on all times if devices share a processor."""
    return tuple(
        Wire(
            link.latency * slower,
            link.bandwidth * link.fraction / slower,
            link.reduce_scatter,
            tuple((size, link.bandwidth * fraction / slower) for size, fraction in link.sizes),
            link.parts,
        )
        for link in cluster.links
    )


def group_of(ranks: Sequence[int], devices: Sequence[int]) -> Group:
    """Return the group of ``ranks``, if links join ``devices`` at each level; uneven parts count as the fullest one."""
    parts, inner, sizes = list(ranks), 1, []
    for outer in devices:
        above = Counter(part * inner // outer for part in parts)
        sizes.append(max(above.values()))
        parts, inner = sorted(above), outer
    return (*sizes[:-1], sizes[-1] * len(parts))


def group(mesh: Mesh, axis: str, cluster: Cluster) -> Group:
    """Return the group of ``axis`` with the slowest links. ``axis``: world, one axis, or several such as dp-cp."""
    devices = tuple(link.devices for link in cluster.links)
    if axis == "world":
        return _world(mesh.world_size, devices)
    if axis in (BETWEEN_NODES, IN_A_NODE):
        inside, *outside = group(mesh, "ep", cluster)
        return (1, *outside) if axis == BETWEEN_NODES else (inside, *(1 for _ in outside))
    if axis in (SHARD, REPLICA):
        return group_of(mesh.parts_of(axis, mesh.dense.group_of(mesh.data_axis, 0))[0], devices)
    return _group(mesh.generator_of(axis), token_of(axis), devices)


def nodes_of_experts(mesh: Mesh, cluster: Cluster | None) -> int:
    """Return the number of nodes over which ep extends with several ranks in each, so that a token is sent to each node
    once; 1 if tokens are sent to ranks directly. Always 1 if the order puts another axis inside ep and etp.
    """
    ranks = mesh.expert.group_of("ep", 0)
    if cluster is None or ranks != list(range(0, mesh.ep * mesh.etp, mesh.etp)):
        return 1
    inner = cluster.links[0].devices // mesh.etp
    return mesh.ep // inner if 1 < inner < mesh.ep and mesh.ep % inner == 0 else 1


@lru_cache(maxsize=1 << 10)
def _world(size: int, devices: tuple[int, ...]) -> Group:
    return group_of(range(size), devices)


@lru_cache(maxsize=1 << 14)
def _group(ranks: RankGenerator, token: str, devices: tuple[int, ...]) -> Group:
    groups = {group_of(ranks.group_of(token, first), devices) for first in _firsts(ranks, devices)}
    return max(groups, key=lambda sizes: tuple(reversed(sizes)))


def _firsts(ranks: RankGenerator, devices: tuple[int, ...]) -> range:
    """Return ranks in groups of every kind: one rank suffices if nodes and axes divide each other."""
    blocks = accumulate(ranks.sizes, mul)
    if all(block % node == 0 or node % block == 0 for block in blocks for node in devices):
        return range(1)
    return range(min(ranks.world_size, 4 * devices[0]))


def level_between(first: int, second: int, cluster: Cluster) -> int:
    """Return the innermost level that joins two ranks."""
    for level, link in enumerate(cluster.links):
        if first // link.devices == second // link.devices:
            return level
    return len(cluster.links) - 1


def outermost(mesh: Mesh, axis: str, cluster: Cluster) -> int | None:
    """Return the level of the slowest links that a group of ``axis`` uses; None for an axis of one rank."""
    return max((level for level, parts in enumerate(group(mesh, axis, cluster)) if parts > 1), default=None)


def neighbours(mesh: Mesh, cluster: Cluster, stage: int) -> int | None:
    """Return the level over which ``stage`` sends to the next stage; None if one rank runs both."""
    rank, after = mesh.pp_rank_of(stage), mesh.pp_rank_of(stage + 1)
    return None if rank == after else level_between(mesh.rank_of(pp=rank), mesh.rank_of(pp=after), cluster)


# ---- seconds


def seconds(kind: str, num_bytes: float, group: Group, levels: Sequence[Wire]) -> float:
    """Return the seconds of an all_reduce, all_gather, reduce_scatter or all_to_all of a tensor of ``num_bytes``."""
    if prod(group) == 1:
        return 0.0
    if kind == "all_to_all":
        return _all_to_all(num_bytes, group, levels)
    ring = _ring(num_bytes, group, levels, summed=kind == "reduce_scatter")
    return ring if kind != "all_reduce" else min(2 * ring, _tree(num_bytes, group, levels))


def send_seconds(num_bytes: float, wire: Wire) -> float:
    """Return the seconds of one message between two ranks."""
    return wire.latency + num_bytes / wire.rate(num_bytes, 2) if num_bytes else 0.0


def _ring(num_bytes: float, group: Group, levels: Sequence[Wire], *, summed: bool = False) -> float:
    total, share = 0.0, num_bytes
    for n, wire in zip(group, levels, strict=True):
        times = wire.reduce_scatter if summed else 1.0
        total += times * ((n - 1) * wire.latency + (n - 1) / n * share / wire.rate(share, n))
        share /= n
    return total


def _tree(num_bytes: float, group: Group, levels: Sequence[Wire]) -> float:
    total, share = 0.0, num_bytes
    for n, wire in zip(group, levels, strict=True):
        if n > 1:
            total += 2 * ceil(log2(n)) * wire.latency + 2 * share / wire.rate(share, n)
        share /= n
    return total


def _all_to_all(num_bytes: float, group: Group, levels: Sequence[Wire]) -> float:
    total, inside = 0.0, 1
    for n, wire in zip(group, levels, strict=True):
        peers = inside * (n - 1)
        total += peers * wire.latency + num_bytes * peers / prod(group) / wire.rate(num_bytes, n)
        inside *= n
    return total
