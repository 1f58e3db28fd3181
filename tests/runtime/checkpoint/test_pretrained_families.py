"""Hugging Face families into engines and out again: one process, four ranks, the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.engine.engine import Engine
from runtime.verify.reference import OneProcess
from tests.tools import pretrained_ranks as ranks
from tests.tools.checkpoints import assert_same, cut_short
from tests.tools.laboratory import session_lab
from tests.tools.tiers import chosen

pytest.importorskip("transformers")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gpt_neox", "bert"])
def test_a_family_goes_in_and_out_and_transformers_loads_it(family, tmp_path):
    model = ranks.save_random(family, tmp_path / "in")
    ranks.copy(tmp_path / "in", tmp_path / "out", {})
    again = type(model).from_pretrained(tmp_path / "out")
    assert_same(again.state_dict(), model.state_dict())


def test_a_model_built_wholly_on_meta_gets_its_rotary_tables_back(tmp_path):
    model = ranks.save_random("llama", tmp_path / "in")
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    with Engine(plan(empty, Spec.load(ranks.spec_of()))) as engine:
        engine.load_pretrained(tmp_path / "in")
        loss = engine.evaluate(ranks.batch())
    assert loss == pytest.approx(model(**ranks.batch()).loss.item(), rel=1e-5)


@pytest.mark.thorough
def test_a_bfloat16_checkpoint_stays_one(tmp_path):
    model = ranks.save_random("llama", tmp_path / "in", dtype=torch.bfloat16)
    ranks.copy(tmp_path / "in", tmp_path / "out", {})
    again = type(model).from_pretrained(tmp_path / "out")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert_same(again.state_dict(), model.state_dict())


STEPS = ("llama", "gpt2", "bert", "t5")


@pytest.fixture(scope="module")
def four_ranks(request, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The cases of four ranks that are compared: per rank the results by where each one wrote, or loaded from."""
    at, families = tmp_path_factory.mktemp("models"), chosen(request, "family")
    families = [family for family in STEPS if family in families]
    for family in {"llama", *families}:
        ranks.save_random(family, at / family)
    ranks.save_random("llama", at / "odd", vocab_size=41, num_key_value_heads=1)
    shutil.copytree(at / "llama", at / "broken")
    cut_short(at / "broken")
    (at / "file").write_text("")
    tp2_pp2 = {"tp": 2, "pp": 2}
    cases = [("step", {"source": at / f, "target": at / f"{f} after", "layout": tp2_pp2}) for f in families]
    cases += [
        ("copy", {"source": at / "odd", "target": at / "odd 1", "layout": tp2_pp2, "max_shard_bytes": 5000}),
        ("copy", {"source": at / "odd 1", "target": at / "odd 2", "layout": {"tp": 4}}),
        ("copy", {"source": at / "odd 2", "target": at / "odd 3", "layout": {"pp": 2, "dp": 2}}),
        ("load_on_one_rank_broken", {"good": at / "llama", "broken": at / "broken", "layout": tp2_pp2}),
        ("save_where_it_cannot", {"source": at / "llama", "target": at / "file", "layout": tp2_pp2}),
    ]
    names = [(arguments.get("target") or arguments["broken"]).name for _, arguments in cases]
    results = session_lab().call(ranks.run_cases, cases)
    return at, [dict(zip(names, of_rank, strict=True)) for of_rank in results]


def on_four_ranks(test: Any) -> Any:
    """Slow: the first of these tests waits for nine cases on four processes."""
    return pytest.mark.slow(test)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@on_four_ranks
@pytest.mark.parametrize("family", STEPS)
def test_load_one_step_save_and_transformers_gives_the_weights_of_one_process(family, four_ranks):
    at, results = four_ranks
    whole = load_model(f"hf:{at / family}", materialize=True).eval()
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    one = OneProcess(whole, Spec.load(ranks.spec_of()))
    loss = one.train_step(ranks.batch())
    assert [result[f"{family} after"] for result in results] == pytest.approx([loss] * 4, rel=1e-5)
    after = dict(type(whole).from_pretrained(at / f"{family} after").named_parameters())
    moved = 0.0
    for name, wanted in one.model.named_parameters():
        torch.testing.assert_close(after[name], wanted, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, (wanted - before[name]).abs().max().item())
    assert moved > 1e-3


@on_four_ranks
def test_from_layout_to_layout_every_bit_stays(four_ranks):
    at, _ = four_ranks
    original = ranks.stored(at / "odd")
    assert len(list((at / "odd 1").glob("*.safetensors"))) > 2
    for directory in ("odd 1", "odd 2", "odd 3"):
        assert_same(ranks.stored(at / directory), original)


@on_four_ranks
def test_a_directory_that_one_rank_cannot_read_is_an_error_on_every_rank_and_loads_nowhere(four_ranks):
    told = [result["broken"] for result in four_ranks[1]]
    assert all("model.safetensors is truncated" in error for error, _ in told)
    assert "rank 1:" in told[0][0]
    assert all(unchanged for _, unchanged in told)


@pytest.mark.thorough
@on_four_ranks
def test_a_save_that_rank_0_cannot_write_is_an_error_on_every_rank(four_ranks):
    told = [result["file"] for result in four_ranks[1]]
    assert all("a file has this name; a directory is needed" in error for error in told)


# ---- command line


@pytest.mark.thorough
def test_verify_of_a_broken_directory_exits_2_before_any_process_starts(tmp_path):
    from typer.testing import CliRunner

    from runtime.cli import app

    ranks.save_random("gpt2", tmp_path / "in")
    cut_short(tmp_path / "in")
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(ranks.spec_of(tp=2)))
    result = CliRunner().invoke(app, ["verify", f"hf:{tmp_path / 'in'}", str(spec)])
    assert result.exit_code == 2, result.output
    assert "model.safetensors is truncated" in result.stderr
    assert "Traceback" not in result.output
