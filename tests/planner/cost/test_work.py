"""The work of a cut, without a new capture: for another size of a microbatch, for a deeper model; its lower bound."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Plan
from planner.cluster.cluster import Cluster
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate
from planner.cost.layout import Layout
from planner.cost.planned import cut_work
from planner.mesh import Mesh
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.tools.captures import plan_again
from tests.tools.examples import examples
from tests.tools.specs import inputs_of

KINDS = ("none", "full", "selective")


def cluster(launch: float, bandwidth: float, latency: float, overlap: float) -> Cluster:
    device = {
        "name": "x", "flops": {"float32": 1e9}, "memory": 10**9, "bandwidth": 1e9, "launch": launch,
        "half_tile": 8, "processors": 4,
    }  # fmt: skip
    links = [
        {"name": "in", "devices": 4, "bandwidth": bandwidth, "latency": latency},
        {"name": "out", "devices": 1024, "bandwidth": bandwidth / 8, "latency": 4 * latency},
    ]
    return Cluster.model_validate({"name": "x", "device": device, "links": links, "overlap": overlap})


CLUSTER = cluster(1e-6, 1e9, 1e-6, 0.5)


@cache
def planned(
    family: str, micro: int, tp: int, sequence_parallel: bool, layers: int = 2, ep: int = 1
) -> tuple[Plan, Spec]:
    inputs = inputs_of(hugging_face.batch(family))
    mesh: dict[str, Any] = {"tp": tp} if ep == 1 else {"tp": tp, "dp": ep, "ep": ep, "etp": 1}
    spec = {
        "mesh": mesh,
        "batch": {"global": micro * mesh.get("dp", 1), "micro": micro},
        "inputs": inputs,
        "tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": sequence_parallel},
    }
    model = hugging_face.build(family) if layers == 2 else deeper(layers)
    made = plan_again(model, spec)
    return made, Spec.load(made.spec)


def deeper(layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {**hugging_face.GPT, "n_layer": layers}
    return GPT2LMHeadModel(GPT2Config(**sizes))


@cache
def work_of(family: str, micro: int, tp: int, sequence_parallel: bool, layers: int = 2, ep: int = 1) -> CutWork:
    made, spec = planned(family, micro, tp, sequence_parallel, layers, ep)
    return cut_work(*made.to_run(), spec, KINDS)


def estimated(work: CutWork, mesh: Mesh, micro: int, kind: str, spec: Spec, sizes: tuple[int, ...]) -> Estimate:
    return Estimate(work, Layout(mesh, micro, 6, False, kind, "1f1b", sizes), CLUSTER, spec)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "tp", "sequence_parallel", "ep"),
    [
        ("gpt2", 1, False, 1),
        ("llama", 2, True, 1),
        ("bert", 2, False, 1),
        ("t5", 1, False, 1),
        ("mixtral", 2, False, 2),
    ],
)
@pytest.mark.parametrize("micro", [3, 8])
def test_a_capture_of_two_sequences_at_another_size_is_a_capture_of_that_size(
    family: str, tp: int, sequence_parallel: bool, ep: int, micro: int
) -> None:
    small, large = (work_of(family, n, tp, sequence_parallel, ep=ep) for n in (2, micro))
    made, spec = planned(family, micro, tp, sequence_parallel, ep=ep)
    for kind in KINDS:
        sizes = (len(small.units),)
        found, known = (estimated(w, made.mesh, micro, kind, spec, sizes) for w in (small, large))
        near = 1e-9 if family == "llama" else 3e-3  # others expand constants to the batch, as mask or ids
        assert found.cost.step_seconds == pytest.approx(known.cost.step_seconds, rel=5e-3)
        (ours,), (theirs,) = found.memory, known.memory
        assert ours.activations + ours.logits == pytest.approx(theirs.activations + theirs.logits, rel=near, abs=1024)
        assert ours.total == pytest.approx(theirs.total, rel=0.005)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_three_layers_repeated_is_the_model_of_six(sizes: tuple[int, ...], kind: str) -> None:
    few, many = work_of("gpt2", 2, 2, False, 3), work_of("gpt2", 2, 2, False, 6)
    _, spec = planned("gpt2", 2, 2, False, 6)
    mesh = Mesh(tp=2, pp=len(sizes))
    found = estimated(few.repeated((0, 1, 1, 1, 1, 2)), mesh, 2, kind, spec, sizes)
    known = estimated(many, mesh, 2, kind, spec, sizes)
    assert found.cost.step_seconds == pytest.approx(known.cost.step_seconds, rel=1e-9)
    assert [row.total for row in found.memory] == [row.total for row in known.memory]


@pytest.mark.thorough
def test_equal_blocks_are_one_object() -> None:
    units = work_of("gpt2", 2, 2, False, 6).units
    assert len({id(unit) for unit in units}) <= 4
    assert units[1] is units[3]


@pytest.mark.thorough
@examples(150)
@given(
    st.sampled_from([(6,), (3, 3), (2, 2, 2), (1, 4, 1), (1, 1, 1, 1, 1, 1)]),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from(KINDS),
    st.sampled_from([1, 2, 16]),
    st.floats(1e-7, 1e-4),
    st.floats(1e6, 1e12),
    st.floats(1e-7, 1e-3),
    st.floats(0, 1),
    st.booleans(),
)
def test_no_estimate_is_below_its_bound(
    sizes: tuple[int, ...], micro: int, count: int, kind: str, dp: int,
    launch: float, bandwidth: float, latency: float, overlap: float, chunks: bool,
) -> None:  # fmt: skip
    stages = len(sizes)
    is_interleaved = chunks and stages in (2, 6)
    pp = stages // 2 if is_interleaved and stages > 2 else stages
    vpp, schedule = (stages // pp, "interleaved_1f1b") if pp < stages else (1, "1f1b")
    count = -(-count // pp) * pp if vpp > 1 else count
    mesh = Mesh(tp=2, pp=pp, vpp=vpp, dp=dp)
    _, spec = planned("gpt2", 2, 2, False, 6)
    machines = cluster(launch, bandwidth, latency, overlap)
    layout = Layout(mesh, micro, count, False, kind, schedule, sizes)
    work = work_of("gpt2", 2, 2, False, 6)
    found = Estimate(work, layout, machines, spec)
    assert found.at_least <= found.cost.step_seconds
