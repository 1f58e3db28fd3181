"""`meshwright checkpoint`: saves listed, verified, and exported as `save_pretrained` would have written them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from planner.capture.model.assembly import Call, Source
from planner.capture.model.hub_format import HubFormat
from planner.tables.diagnostics import stored_notes
from runtime.checkpoint.conversion import Described, export, import_weights
from runtime.checkpoint.saves import resolve, verify
from runtime.cli import app
from runtime.engine.engine import Engine
from tests.tools.checkpoints import Own, assert_same, own_engine
from tests.tools.commands import python
from tests.tools.pretrained_ranks import batch, plan_of, save_random
from tests.tools.resumed import stored as values_of
from tests.tools.small_saves import save

pytest.importorskip("transformers")

from planner.capture.model.reference import load_model
from tests.runtime.checkpoint.test_quantised_weights import in_fp8
from tests.tools.hub_directories import saved, stored


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_saves_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, 1.0)
    (tmp_path / "step-00000002" / "rank-00000.safetensors").unlink()
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    listed = run(tmp_path)
    lines = [line for line in listed.stdout.splitlines() if "step-" in line]
    assert ["complete, not verified" in line for line in lines] == [True, False, True]
    assert "cannot read rank-00000.safetensors: No such file or directory" in lines[1]
    assert lines[2].rstrip().endswith(", latest")
    assert listed.exit_code == 1
    verified = run(tmp_path, "--verify")
    lines = [line for line in verified.stdout.splitlines() if "step-" in line]
    assert "rank-00000.safetensors is damaged" in lines[0]
    assert lines[2].rstrip().endswith("intact, latest")
    alone = run(tmp_path / "step-00000003", "--verify")
    assert alone.exit_code == 0
    assert "intact" in alone.stdout


def test_a_damaged_latest_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    (tmp_path / "latest").write_text("step-00000009 0\n")
    found = run(tmp_path)
    assert found.exit_code == 1
    assert "latest is damaged" in found.stdout


def test_no_save_or_a_damaged_one_is_one_message(tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path / "nowhere"], [tmp_path, "--export", tmp_path / "out"]):
        found = run(*arguments)
        assert found.exit_code == 2
        assert "Traceback" not in found.output
        assert "save" in found.stderr
    save(tmp_path, 1, 1.0)
    (tmp_path / "step-00000001" / "rank-00000.safetensors").write_bytes(b"")
    found = run(tmp_path, "--export", tmp_path / "out")
    assert found.exit_code == 2
    assert "rank-00000.safetensors has 0 bytes" in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_an_export_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_random("gpt2", tmp_path / "in")
    with Engine(plan_of(tmp_path / "in")) as engine:
        engine.load_pretrained(tmp_path / "in")
        engine.train_step(batch())
        engine.save(tmp_path / "run")
        engine.save_pretrained(tmp_path / "there")
    found = run(tmp_path / "run", "--export", tmp_path / "out")
    assert found.exit_code == 0, found.output
    names = {path.name for path in (tmp_path / "there").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight


def ids() -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}


def test_what_reaches_no_loss_and_buffers_come_back(tmp_path: Path) -> None:
    model = Own()
    with torch.no_grad():
        model.scale.fill_(3.0)
    with own_engine(model) as engine:
        engine.train_step(ids())
        engine.save(tmp_path / "run")
        wanted, loss = engine.gather_parameters(), engine.train_step(ids()).loss
        engine.save_pretrained(tmp_path / "later")
    truth = values_of(tmp_path / "run")
    with own_engine(Own()) as engine:
        engine.load(tmp_path / "run")
        assert_same(engine.gather_parameters(), wanted)
        engine.save(tmp_path / "again")
        assert engine.train_step(ids()).loss == loss
        engine.save_pretrained(tmp_path / "resumed")
    again = values_of(tmp_path / "again")
    assert again.keys() == truth.keys()
    assert all(torch.equal(again[key], value) for key, value in truth.items())
    assert ("seen", "buffer") in truth
    assert ("unused", "parameter") in truth
    assert_same(stored(tmp_path / "resumed"), stored(tmp_path / "later"))
    export(resolve(tmp_path / "run"), verify(resolve(tmp_path / "run")), tmp_path / "out")
    held = stored(tmp_path / "out")
    assert "head.weight" not in held
    assert torch.equal(held["scale"], torch.tensor(3.0))
    assert all(torch.equal(value, wanted[name]) for name, value in held.items() if name in wanted)


@pytest.mark.thorough
def test_listing_loads_no_model_code(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    code = (
        "import sys; from runtime.cli import app; app(['checkpoint', sys.argv[1], '--verify'], standalone_mode=False)\n"
    )
    code += "assert 'transformers' not in sys.modules and 'planner.api' not in sys.modules"
    done = python("-c", code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "intact, latest" in done.stdout


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
