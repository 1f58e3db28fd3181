"""The spec: what it means, and one clear error with a line for everything that is wrong with it."""

import pickle
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from expecttest import assert_expected_inline

from passes.errors import PlanError, SpecError
from planner.spec.inputs import InputSpec
from planner.spec.spec import Spec
from tests.tools.specs import MINIMAL, TWO_LINES, error, load

pytestmark = pytest.mark.check

EXAMPLES = sorted(Path(str(files("specs"))).glob("*.yaml"))


def test_every_key_has_its_default_but_mesh_and_batch():
    spec = Spec.load(MINIMAL)
    assert (spec.mesh.tp, spec.mesh.pp, spec.mesh.order) == (2, 1, "tp-cp-ep-dp-pp")
    assert (spec.batch.global_size, spec.batch.micro, spec.num_microbatches) == (8, 2, 4)
    assert spec.precision.parameters is None
    assert spec.tensor_parallel.vocabulary_multiple == 128
    assert (spec.optimizer.clip_grad_norm, spec.optimizer.bucket_size) == (1.0, None)
    assert spec.loss == "auto"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_specs_load_and_their_dict_loads_to_the_same(path: Path):
    spec = Spec.load(path)
    assert spec.require_inputs()["labels"].shape == spec.inputs["input_ids"].shape
    assert Spec.load(spec.to_dict()) == spec
    assert yaml.safe_load(yaml.safe_dump(spec.to_dict())) == spec.to_dict()


def test_exponents_without_a_dot_are_numbers(tmp_path):
    spec = load(tmp_path, TWO_LINES + "optimizer: {eps: 1e-8, lr: 6E-5, schedule: {kind: cosine, steps: 3e5}}")
    assert (spec.optimizer.eps, spec.optimizer.lr, spec.optimizer.schedule.steps) == (1e-8, 6e-5, 300_000)
    assert Spec.load({**MINIMAL, "optimizer": {"eps": "1e-8"}}).optimizer.eps == 1e-8
    assert yaml.safe_load("1e-8") == "1e-8"  # PyYAML's own loader is as it was


@pytest.mark.parametrize(("mesh", "etp"), [("tp: 4", 4), ("tp: 4, etp: 1", 1), ("tp: auto, pp: 2", None)])
def test_etp_left_out_is_tp(tmp_path, mesh, etp):
    text = f"mesh: {{{mesh}}}\nbatch: {{global: 16, micro: 2}}\n"
    spec = load(tmp_path, text)
    assert spec.mesh.etp == spec.to_dict()["mesh"]["etp"] == etp
    assert Spec.load(spec.to_dict()) == spec


def test_a_cluster_file_is_looked_for_here_and_then_beside_the_spec(tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    for directory in (here, beside):
        directory.mkdir()
        (directory / "cluster.yaml").write_text("devices: 8\n")
    monkeypatch.chdir(here)
    assert load(beside, TWO_LINES + "cluster: cluster.yaml").cluster == "cluster.yaml"
    (here / "cluster.yaml").unlink()
    assert load(beside, TWO_LINES + "cluster: cluster.yaml").cluster == str(beside / "cluster.yaml")
    assert load(here, TWO_LINES + f"cluster: {beside / 'cluster.yaml'}").cluster == str(beside / "cluster.yaml")


def test_a_cluster_file_that_is_not_there_is_an_error_at_its_line(tmp_path):
    message = error(tmp_path, TWO_LINES + "cluster: no-such-file.yaml\n").splitlines()
    assert message[0].startswith("cluster: there is no file no-such-file.yaml (looked in . and ")
    assert message[1:] == [
        "  at:  spec.yaml:3",
        "  fix: name a YAML file that describes the machines, or a shipped one: "
        "cpu-local, dgx-2h, dgx-a100, dgx-h100, h200",
    ]
    with pytest.raises(SpecError, match=r"there is no file no-such-file\.yaml"):
        Spec.load({**MINIMAL, "cluster": "no-such-file.yaml"})


def test_a_shipped_cluster_keeps_the_name_that_is_true_on_any_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path, TWO_LINES + "cluster: dgx-h100").cluster == "dgx-h100"
    assert load(tmp_path, TWO_LINES + "cluster: specs/clusters/h200.yaml").cluster == "specs/clusters/h200.yaml"
    (tmp_path / "dgx-h100").write_text("own: 1\n")  # a file here comes first
    assert load(tmp_path, TWO_LINES + "cluster: dgx-h100").cluster == "dgx-h100"


@pytest.mark.parametrize(("content", "line"), [("gpu: [1\nb: 2\n", 2), ("- 1\n", 1), ("a: 1\na: 2\n", 2)])
def test_a_cluster_file_that_is_not_valid_is_an_error_at_its_own_line(tmp_path, content, line):
    (tmp_path / "cluster.yaml").write_text(content)
    with pytest.raises(SpecError) as caught:
        load(tmp_path, TWO_LINES + "cluster: cluster.yaml")
    assert str(caught.value.where) == f"cluster.yaml:{line}"


def test_an_input_like_another_takes_what_it_does_not_say(tmp_path):
    spec = load(
        tmp_path,
        TWO_LINES
        + "inputs: {a: {shape: [4], dtype: int64, high: 9}, b: {like: a, dtype: int32}, c: {like: b, shape: []}}",
    )
    assert spec.inputs["b"] == InputSpec(shape=(4,), dtype="int32", high=9, like="a")
    assert spec.inputs["c"] == InputSpec(shape=(), dtype="int32", high=9, like="b")


def test_a_dtype_may_be_torchs_own():
    import torch

    inputs = {"x": {"shape": (4,), "dtype": torch.float32}}
    assert Spec.load({**MINIMAL, "inputs": inputs}).inputs["x"].dtype == "float32"


def test_loss_may_name_an_output():
    spec = Spec.load({**MINIMAL, "loss": {"output": "lm_loss"}})
    assert spec.loss == "lm_loss"
    assert Spec.load(spec.to_dict()).loss == "lm_loss"
    assert Spec.load({**MINIMAL, "loss": {"output": 1}}).loss == "1"


def test_auto_stands_for_the_mesh_or_for_one_axis():
    assert Spec.load({**MINIMAL, "mesh": "auto"}).mesh.pp == "auto"
    spec = Spec.load({**MINIMAL, "mesh": {"tp": "auto", "dp": "auto"}})
    assert spec.mesh.has_auto
    assert (spec.mesh.tp, spec.mesh.pp) == ("auto", 1)
    assert spec.recompute == "none"
    with pytest.raises(SpecError, match="number of microbatches is not known"):
        _ = spec.num_microbatches


def test_with_an_auto_mesh_all_that_the_spec_does_not_write_is_left_to_the_search():
    batch = {"global": 16}
    spec = Spec.load({"mesh": "auto", "batch": batch, "pipeline": {"schedule": "gpipe"}})
    assert (spec.batch.micro, spec.recompute, spec.tensor_parallel.sequence_parallel) == ("auto", "auto", "auto")
    assert (spec.pipeline.schedule, spec.mesh.order) == ("gpipe", "auto")
    assert Spec.load(spec.to_dict()) == spec
    part = Spec.load({"mesh": {"tp": "auto"}, "batch": batch})
    assert (part.batch.micro, part.mesh.dp, part.recompute, part.pipeline.schedule) == ("auto", "auto", "none", "1f1b")
    with pytest.raises(SpecError, match=r"batch.micro is missing"):
        Spec.load({"mesh": {"tp": 2}, "batch": batch})


@pytest.mark.parametrize(
    "keys",
    [
        {"batch": {"global": 16, "micro": "auto"}},
        {"recompute": "auto"},
        {"tensor_parallel": {"sequence_parallel": "auto"}},
        {"pipeline": {"schedule": "auto"}},
        {"mesh": {"tp": 2, "order": "auto"}},
    ],
    ids=str,
)
def test_auto_without_an_axis_that_is_auto_is_refused(keys):
    with pytest.raises(SpecError, match="is auto, but no axis of the mesh is"):
        Spec.load({**MINIMAL, **keys})


def test_devices_are_those_of_the_mesh_where_it_is_given():
    assert Spec.load({**MINIMAL, "mesh": {"tp": 2}, "devices": 2}).devices == 2
    with pytest.raises(SpecError, match="devices = 8, but the mesh has 2 ranks"):
        Spec.load({**MINIMAL, "mesh": {"tp": 2}, "devices": 8})


def test_null_clipping_means_none_and_python_none_means_the_word_none():
    spec = Spec.load({**MINIMAL, "optimizer": {"clip_grad_norm": None}, "recompute": None})
    assert spec.optimizer.clip_grad_norm is None
    assert spec.recompute == "none"


def test_anchors_and_merges_work(tmp_path):
    spec = load(tmp_path, TWO_LINES + "inputs:\n  a: &a {shape: [4], dtype: int64}\n  b: {<<: *a, dtype: int32}\n")
    assert spec.inputs["b"] == InputSpec(shape=(4,), dtype="int32")


def test_location_is_the_line_of_a_key_or_of_what_is_around_it(tmp_path):
    spec = load(tmp_path, TWO_LINES + "tensor_parallel:\n  overrides:\n    '*.lm_head': replicate\n")
    assert str(spec.location("tensor_parallel.overrides.*.lm_head")) == "spec.yaml:5"
    assert str(spec.location("mesh.vpp")) == "spec.yaml:1"
    assert str(Spec.load(MINIMAL).location("mesh.vpp")) == "mesh.vpp"


def test_locate_gives_an_error_of_the_planner_its_line(tmp_path):
    spec = load(tmp_path, TWO_LINES)
    assert str(spec.locate(PlanError("too few", where="batch.global", fix="more")).where) == "spec.yaml:2"
    elsewhere = PlanError("no", where="model.h.0", fix="none")
    assert spec.locate(elsewhere) is elsewhere


def test_a_spec_loads_to_itself_and_pickles(tmp_path):
    spec = load(tmp_path, TWO_LINES)
    assert Spec.load(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_inputs_may_be_missing_until_they_are_needed(tmp_path):
    spec = load(tmp_path, TWO_LINES)
    with pytest.raises(SpecError) as caught:
        spec.require_inputs()
    assert_expected_inline(
        str(caught.value),
        """\
inputs is missing
  at:  spec.yaml:1
  fix: add `inputs: {input_ids: {shape: [1024], dtype: int64, high: 50257}, labels: {like: input_ids}}`; \
in Python, plan() takes example_inputs instead""",
    )
