"""A note on weights in shards: when they are freed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cluster.cluster import Cluster
from planner.cost.memory import MemoryRow
from planner.cost.planned import usable_bytes
from planner.saved.lowered import Lowered
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from planner.tables.rows import Diagnostic
from planner.tables.sizes import format_bytes


def sharded_notes(
    spec: Spec, lowered: Lowered, memory: Sequence[MemoryRow], cluster: Cluster | None
) -> Iterator[Diagnostic]:
    """One, if the plan chose with several microbatches."""
    if not any(buffer.gathers for buffer in lowered.shards.buffers) or spec.num_microbatches == 1:
        return
    if spec.optimizer.reshard != AUTO:
        return
    at, once = "optimizer.reshard", "gathered once a step and whole until its end"
    if cluster is None:
        what = "weights are freed after each use: without a cluster the plan does not know whether they fit"
        yield Diagnostic("info", what, at, f"set reshard: false for weights that are {once}, or name a cluster")
    elif lowered.shards.reshards:
        yield Diagnostic("info", f"weights are freed after each use: {once}, they do not fit", at)
    else:
        most, usable = max(row.total for row in memory), usable_bytes(cluster)
        what = f"weights are {once}: the fullest rank needs {format_bytes(most)} of {format_bytes(usable)}"
        yield Diagnostic("info", what, at, "set reshard: true to free them after each use")
