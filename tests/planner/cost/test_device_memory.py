"""Bytes beside a process's tensors: by hand, in a plan's rows, and in what a search takes to fit."""

import pytest

from planner.cluster.cluster import Cluster, read_cluster
from planner.cost.memory import device_bytes, on_device
from planner.mesh import Mesh
from runtime.distributed.opening import communicators
from tests.models import hugging_face
from tests.runtime.distributed.test_first_use import MESHES
from tests.tools.captures import plan_again
from tests.tools.specs import inputs_of

CONTEXT, INNER, OUTER = 500_000_000, 400_000_000, 200_000_000  # of dgx-a100
CLUSTER = read_cluster("dgx-a100")


def test_one_context_and_a_communicator_for_each_group() -> None:
    assert device_bytes(Mesh(), CLUSTER) == CONTEXT
    assert device_bytes(Mesh(tp=8), CLUSTER) == CONTEXT + 2 * INNER  # its own, and that of all ranks
    assert device_bytes(Mesh(tp=8, pp=2), CLUSTER) == CONTEXT + INNER + 3 * OUTER  # two directions
    assert device_bytes(Mesh(tp=4, pp=2, dp=2), CLUSTER) == CONTEXT + INNER + INNER + 3 * OUTER


LIKE_RUNS = {
    **MESHES,
    "zero 3": (Mesh(tp=2, dp=4), [], ["dp of weights"]),
    "zero 3, experts": (Mesh(tp=2, dp=4, ep=4), [], ["dp of weights", "edp of weights"]),
    "zero 3, groups of shards": (Mesh(dp=4, shard=2), [], ["shard", "replica", "shard of weights"]),
    "muon": (Mesh(tp=2, dp=2), [], ["tp-dp"]),
}


@pytest.mark.parametrize("name", LIKE_RUNS)
def test_as_many_communicators_are_counted_as_a_run_makes(name: str) -> None:
    mesh, tied, *more = LIKE_RUNS[name]
    combined = [axis for axes in more for axis in axes]
    links = tuple(link.model_copy(update={"communicator": 1}) for link in CLUSTER.links)
    device = CLUSTER.device.model_copy(update={"context": 0})
    one_byte: Cluster = CLUSTER.model_copy(update={"links": links, "device": device})
    made = communicators(mesh, tied, combined)
    dense = {"etp": "tp", "edp": mesh.data_axis}
    for rank in range(mesh.world_size):
        own = {(dense.get(str(m.name), m.name), m.members) for m in made if rank in m.members}
        pp_rank = mesh.coordinate(rank)["pp"]
        over = {stages: {mesh.pp_rank_of(stage) for stage in stages} for stages in tied}
        sets = [f"embedding{stages}" for stages, ranks in over.items() if len(ranks) > 1 and pp_rank in ranks]
        assert device_bytes(mesh, one_byte, pp_rank, [*combined, *sets]) == len(own)


def test_a_cluster_without_figures_has_none() -> None:
    assert device_bytes(Mesh(tp=2, dp=2), read_cluster("cpu-local")) == 0


def test_rows_of_a_plan_have_them() -> None:
    value = hugging_face.batch("gpt2")
    inputs = inputs_of(value)
    spec = {"mesh": {"tp": 2}, "batch": {"global": 2, "micro": 2}, "inputs": inputs}
    model = hugging_face.build("gpt2")
    plain, placed = plan_again(model, spec), plan_again(model, {**spec, "cluster": "dgx-a100"})
    (before,), (after,) = plain.memory, placed.memory
    assert (before.device, after.device) == (0, CONTEXT + 2 * INNER)
    assert after.total - before.total >= after.device - 1_000_000  # kernels of a GPU may need less
    assert "1.21 GiB" in placed.describe().partition("Memory of one rank")[2]


def test_rows_stay_as_they_are_without_a_cluster() -> None:
    assert on_device([], Mesh(), None) == ()


def test_more_bytes_of_a_communicator_are_more_bytes_of_a_rank() -> None:
    links = tuple(link.model_copy(update={"communicator": 10**9}) for link in CLUSTER.links)
    more: Cluster = CLUSTER.model_copy(update={"links": links})
    assert device_bytes(Mesh(tp=2), more) == CONTEXT + 2 * 10**9
