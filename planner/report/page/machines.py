"""The cluster of a plan, if its file can be read: a saved plan may be opened on another machine."""

from __future__ import annotations

from itertools import pairwise

from passes.errors import PlanError
from planner.cluster.cluster import Cluster
from planner.cluster.links import EXPERT_AXES, group, level_between
from planner.cluster.read import read_cluster
from planner.tables.tables import Tables


def cluster_of(plan: Tables) -> tuple[Cluster | None, str]:
    """The cluster, and why there is none."""
    name = plan.spec.get("cluster")
    if not name:
        return None, "the spec names no cluster"
    try:
        return read_cluster(str(name)), ""
    except PlanError as error:
        return None, f"the cluster {name} cannot be read: {error.what}"


def link_of(axis: str, plan: Tables, cluster: Cluster | None) -> str:
    """The slowest link that an exchange over ``axis`` uses; "" if that is not known."""
    mesh = plan.mesh
    if cluster is None:
        return ""
    if axis in ("pp", "embedding"):
        firsts = [mesh.rank_of(pp=stage.pp_rank) for stage in plan.stages]
        pairs = pairwise(firsts) if axis == "pp" else [(firsts[0], firsts[-1])]
        level = max((level_between(a, b, cluster) for a, b in pairs), default=0)
    elif set(axis.split("-")) <= {*EXPERT_AXES, "world", "tp", "cp", "dp"}:
        sizes = group(mesh, axis, cluster).sizes
        level = max((level for level, n in enumerate(sizes) if n > 1), default=0)
    else:
        return ""
    return cluster.links[level].name
