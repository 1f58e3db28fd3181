"""The spec that a search writes says the layout, keeps the user's other keys, and searches nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.captured import prepare
from planner.cluster.cluster import read_cluster
from planner.cost.layout import Layout
from planner.mesh import Mesh
from planner.pipeline.schedule import fold_of
from planner.search.search import search
from planner.search.space import Cut, Point
from planner.search.winner import planned_spec, winner_text
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.models.deep import captured, spec_of
from tests.tools.captures import captured_again, plan_again

TEXT = """# a comment
mesh: {mesh}
batch: {{global: 16}}
inputs: {{input_ids: {{shape: [16], dtype: int64, high: 50}}}}
optimizer: {{lr: 1e-3}}
cluster: dgx-a100
"""


def point(recompute: str = "full", order: str = "tp-cp-ep-dp-pp", vpp: int = 1, kind: str = "") -> Point:
    schedule = kind or ("interleaved_1f1b" if vpp > 1 else "1f1b")
    mesh = Mesh(tp=2, pp=2, dp=2, vpp=vpp, order=order, fold=fold_of(schedule))
    return Point(Cut(2, True, etp=2), Layout(mesh, 2, 4, True, recompute, schedule, (3,) * 2 * vpp))


@pytest.mark.parametrize("mesh", ["auto", "{tp: auto, pp: 2}"])
@pytest.mark.parametrize(
    "chosen",
    [point(), point("none", "tp-cp-ep-pp-dp", 2), point(vpp=2, kind="zero_bubble_v")],
    ids=["plain", "interleaved", "a v"],
)
def test_the_written_spec_is_the_planned_one(tmp_path: Path, mesh: str, chosen: Point):
    given, written = tmp_path / "given.yaml", tmp_path / "written.yaml"
    given.write_text(TEXT.format(mesh=mesh))
    asked = Spec.load(given)
    written.write_text(winner_text(given, asked, chosen, "the fastest\nof many"))
    assert written.read_text().startswith("# the fastest\n# of many\nmesh: {")
    spec = Spec.load(written)
    assert spec == planned_spec(asked, chosen)
    assert not spec.mesh.has_auto
    assert spec.mesh.to_mesh(fold_of(spec.pipeline.schedule)) == chosen.layout.mesh
    assert (spec.batch.micro, spec.recompute, spec.num_microbatches) == (2, chosen.layout.recompute, 4)
    assert spec.tensor_parallel.sequence_parallel is True
    assert (spec.optimizer.lr, spec.cluster) == (1e-3, "dgx-a100")


def test_errors_of_the_planned_spec_name_the_lines_of_the_given_one(tmp_path: Path):
    given = tmp_path / "given.yaml"
    given.write_text(TEXT.format(mesh="auto"))
    assert str(planned_spec(Spec.load(given), point()).location("batch.global")) == "given.yaml:3"


def test_devices_of_the_command_line_are_those_of_the_spec(tmp_path: Path):
    given = tmp_path / "given.yaml"
    given.write_text(TEXT.format(mesh="auto") + "devices: 64\n")
    asked = Spec.load(given).with_devices(8)
    assert asked.devices == 8
    assert "devices: 8" in winner_text(given, asked, point(), "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [16])
def test_layouts_are_sorted_by_seconds_and_begin_with_the_chosen_one(devices):
    found = search(captured("gpt2"), spec_of("gpt2", cluster="dgx-a100", devices=devices), read_cluster("dgx-a100"))
    seconds = [candidate.seconds for candidate in found.best]
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    behind = [c for c in found.estimated if c.fullest.total <= found.memory_bytes and c.order < found.winner.order]
    assert all(c.point.key > found.winner.point.key for c in behind)


@pytest.mark.thorough
def test_the_winner_is_the_same_however_many_are_shown():
    spec = spec_of("gpt2", cluster="dgx-a100", devices=16)
    results = [search(captured("gpt2"), spec, read_cluster("dgx-a100"), top=top) for top in (1, 3, 12)]
    assert len({result.winner.point for result in results}) == 1
    fits = [c for c in results[-1].estimated if c.fullest.total <= results[-1].memory_bytes]
    fastest = min(fits, key=lambda candidate: candidate.order)
    assert results[0].winner.seconds <= 1.03 * fastest.seconds
    assert results[0].winner.point.key <= fastest.point.key
    assert [len(result.best) for result in results] == [1, 3, 12]


@pytest.mark.thorough
def test_a_loss_that_fills_a_stage_has_one_in_the_search_as_in_the_plan():
    member = hugging_face.ZOO["gpt2"]
    model = hugging_face.made(replace(member, sizes=member.sizes | {"n_layer": 6, "vocab_size": 4096}))
    sizes = {"global": 8, "micro": hugging_face.BATCH}
    spec = spec_of("gpt2", mesh={"tp": "auto", "pp": 4, "dp": 1, "vpp": 1}, batch=sizes, recompute="none", devices=4)
    found = search(prepare(captured_again(model, spec), spec), spec, read_cluster("cpu-local")).winner
    made = plan_again(model, planned_spec(spec, found.point).to_dict())
    of_stages = made.to_run()[0].stages.blocks_of_stage
    assert found.point.layout.sizes == tuple(map(len, of_stages))
    assert found.point.layout.sizes[-1] == 0
    assert made.cost is not None
    assert found.seconds == pytest.approx(made.cost.step_seconds, rel=1e-6)
