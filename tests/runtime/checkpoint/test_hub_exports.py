"""The commands that write directories of the Hub: their names, their lines, and what a plan says beforehand."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from planner.capture.model.assembly import Call, Source
from planner.capture.model.hub_format import HubFormat
from planner.tables.diagnostics import stored_notes
from runtime.checkpoint.conversion import Described, import_weights
from runtime.cli import app

pytest.importorskip("transformers")

from planner.capture.model.reference import load_model
from tests.runtime.checkpoint.test_fp4_weights import in_fp8
from tests.tools.checkpoints import assert_same
from tests.tools.hub_directories import saved, stored


@pytest.mark.parametrize("command", ["export", "checkpoint"])
def test_names_of_the_hub_or_of_the_model(command, tmp_path):
    own = saved("mixtral", tmp_path / "in").state_dict()
    import_weights(tmp_path / "in", tmp_path / "run")
    for names, wanted in (("hf", stored(tmp_path / "in")), ("model", own)):
        out = tmp_path / names
        given = [command, str(tmp_path / "run"), *(["--export"] if command == "checkpoint" else []), str(out)]
        done = CliRunner().invoke(app, [*given, "--names", names])
        assert done.exit_code == 0, done.output
        assert_same(stored(out), wanted)


def test_an_export_of_quantised_weights_is_plain_and_says_so(tmp_path):
    saved("mixtral", tmp_path / "in")
    in_fp8(tmp_path / "in")
    import_weights(tmp_path / "in", tmp_path / "run")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert done.stdout.endswith("out: was FP8, is float32\n")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    given, written = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert written.keys() == {name for name in given if not name.endswith("_scale_inv")}
    wanted = load_model(f"hf:{tmp_path / 'in'}", materialize=True).state_dict()
    assert_same(load_model(f"hf:{tmp_path / 'out'}", materialize=True).state_dict(), wanted)


def test_a_plan_names_an_op_that_reads_whole_tensors_with_its_bytes():
    made = Call("aten.mul.Tensor", (Source("up", (4, 6)), 2), 0, (4, 6))
    rows = (Described("up", (4, 6), "bfloat16", ()),)
    (note,) = stored_notes(HubFormat(names={"up.halved": made}), rows)
    assert note.what == (
        "stored tensors are converted by aten.mul.Tensor, which has no rule for parts: it reads 48 bytes whole, and so "
        "does each rank that needs a part"
    )
