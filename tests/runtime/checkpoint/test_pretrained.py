"""Hugging Face directories in and out: the weights of one process from any layout, bitwise, and nothing by half."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from planner import PlanError, meta_parameters, plan
from planner.capture.model.hub_format import HubFormat
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.checkpoint.pretrained_load import check_pretrained, match_names
from runtime.checkpoint.safetensors_files import INDEX, SINGLE
from runtime.distributed.launch import launch
from runtime.engine import Engine
from runtime.verify.reference import OneProcess
from tests.tools import pretrained_ranks as ranks

pytest.importorskip("transformers")


# ---- one process, a model of our own


class Own(nn.Module):
    """No Hugging Face model: a tied weight, a parameter and persistent buffers that reach no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor([5, 6]))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.up(self.embed(ids)) * self.scale + self.table
        return self.head(hidden).logsumexp(-1).mean()


def own_engine(model: nn.Module, **sections: Any) -> Engine:
    given = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": {"shape": [3], "dtype": "int64"}}}
    return Engine(plan(model, Spec.load({**given, **sections})))


def own_checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in Own().state_dict().items() if name != "head.weight"}
    return {**state, "scale": torch.tensor(3.0), "seen": torch.tensor([7, 8])}


def write(directory: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / name)
    return directory


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_saved_directory_holds_what_was_loaded_bit_by_bit(tmp_path):
    source = write(tmp_path / "in", own_checkpoint())
    engine = own_engine(Own())
    engine.load_pretrained(source)
    engine.save_pretrained(tmp_path / "out")
    assert_same(ranks.stored(tmp_path / "out"), own_checkpoint())


def test_a_meta_model_is_loaded_without_being_initialised(tmp_path, monkeypatch):
    with meta_parameters():
        model = Own()
    tensors = own_checkpoint()
    source = write(tmp_path / "in", tensors)
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: pytest.fail("drew fresh weights"))
    engine = own_engine(model)
    engine.load_pretrained(source)
    assert torch.equal(engine.gather_parameters()["up.weight"], tensors["up.weight"])


def test_a_meta_model_that_nobody_loads_is_initialised_at_its_first_step():
    with meta_parameters():
        model = Own()
    engine = own_engine(model)
    engine.evaluate({"ids": torch.zeros(2, 3, dtype=torch.int64)})
    found = engine.gather_parameters()
    assert found["up.weight"].std() > 0
    assert_same({"bias": found["up.bias"]}, {"bias": torch.zeros(4)})


def test_loaded_weights_are_what_the_optimizer_updates(tmp_path):
    """In bfloat16 the optimizer has weights of its own, which must not stay those of before."""
    source = write(tmp_path / "in", own_checkpoint())
    settings = {"precision": {"parameters": "bfloat16"}, "optimizer": {"lr": 1e-9, "weight_decay": 0.0}}
    engine = own_engine(Own(), **settings)
    engine.load_pretrained(source)
    engine.train_step({"ids": torch.zeros(2, 3, dtype=torch.int64)})
    found = engine.gather_parameters()
    assert torch.equal(found["up.weight"], own_checkpoint()["up.weight"].bfloat16())


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path):
    tensors = own_checkpoint()
    embedding = tensors.pop("embed.weight")
    other = write(tmp_path / "alias", {**tensors, "head.weight": embedding})
    both = write(tmp_path / "both", {**tensors, "head.weight": embedding, "embed.weight": embedding.clone()})
    for directory in (other, both):
        engine = own_engine(Own())
        engine.load_pretrained(directory)
        assert torch.equal(engine.gather_parameters()["embed.weight"], embedding)


def test_stored_dtypes_are_cast_to_the_planned_one(tmp_path):
    tensors = {n: v.bfloat16() if v.is_floating_point() else v for n, v in own_checkpoint().items()}
    engine = own_engine(Own())
    engine.load_pretrained(write(tmp_path / "in", tensors))
    assert_same({"w": engine.gather_parameters()["up.weight"]}, {"w": tensors["up.weight"].float()})


def test_a_save_makes_an_index_of_several_files_and_any_of_them_loads(tmp_path):
    engine = own_engine(Own())
    engine.save_pretrained(tmp_path / "one")
    engine.save_pretrained(tmp_path / "many", max_shard_bytes=80)
    names = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert names == [*(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), INDEX]
    assert_same(ranks.stored(tmp_path / "many"), ranks.stored(tmp_path / "one"))


def test_a_save_replaces_an_older_one_and_keeps_other_peoples_files(tmp_path):
    engine = own_engine(Own())
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "words.txt").write_text("words")
    engine.save_pretrained(tmp_path, max_shard_bytes=80)
    engine.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SINGLE, "tokenizer"]
    assert (tmp_path / "tokenizer" / "words.txt").read_text() == "words"
    assert not list(tmp_path.parent.glob(".*.partial"))


def test_a_save_that_breaks_off_leaves_the_old_directory_as_it_was(tmp_path, monkeypatch):
    engine = own_engine(Own())
    engine.save_pretrained(tmp_path / "out")
    before = ranks.stored(tmp_path / "out")
    engine.load_pretrained(write(tmp_path / "in", own_checkpoint()))

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(PlanError, match="No space left on device"):
        engine.save_pretrained(tmp_path / "out")
    assert_same(ranks.stored(tmp_path / "out"), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


# ---- bad input: one error each, and no weight changes


def remove(name: str):
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor):
    return lambda tensors: tensors.update({name: value})


MISFITS = {
    "absent": (remove("up.bias"), r"absent: up\.bias"),
    "absent unused": (remove("unused"), "absent: unused"),
    "absent buffer": (remove("seen"), "absent: seen"),
    "unexpected": (put("down.weight", torch.ones(2)), r"unexpected in model\.safetensors: down\.weight"),
    "shape": (put("up.weight", torch.ones(4, 5)), r"up\.weight in model\.safetensors has shape \[4, 5\], the model "),
    "quantised": (put("up.weight", torch.ones(4, 4, dtype=torch.int8)), r"up\.weight in .* is stored as int8"),
    "tied differ": (put("head.weight", torch.ones(10, 4)), r"embed\.weight and head\.weight differ in the checkpoint"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_one_error_and_changes_nothing(case, tmp_path):
    change, words = MISFITS[case]
    tensors = own_checkpoint()
    change(tensors)
    engine = own_engine(Own())
    before = engine.gather_parameters()
    with pytest.raises(PlanError, match=words) as caught:
        engine.load_pretrained(write(tmp_path / "in", tensors))
    assert SINGLE in str(caught.value.where)
    assert_same(engine.gather_parameters(), before)


def cut_short(directory: Path) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-4])


def shards(directory: Path, change: Any = None, **places: str) -> None:
    """Two shards and an index in place of the one file; ``change`` the index's text, or ``places`` of tensors."""
    tensors = own_checkpoint()
    (directory / SINGLE).unlink()
    files = {name: "b.safetensors" if name == "seen" else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: value for name, value in tensors.items() if files[name] == file}, directory / file)
    text = json.dumps({"weight_map": {**files, **places}})
    (directory / INDEX).write_text(change(text) if change else text)


def without_index_entry(directory: Path) -> None:
    shards(directory, lambda text: json.dumps({"weight_map": {
        n: f for n, f in json.loads(text)["weight_map"].items() if n != "scale"}}))  # fmt: skip


def without_shard(directory: Path) -> None:
    shards(directory)
    (directory / "b.safetensors").unlink()


def pickled(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


DAMAGES = {
    "cut short": (cut_short, r"model\.safetensors is cut short or no safetensors file"),
    "empty file": (lambda d: (d / SINGLE).write_bytes(b""), r"model\.safetensors is cut short"),
    "text": (lambda d: (d / SINGLE).write_text("version https://git-lfs"), r"model\.safetensors is cut short or no "),
    "no weights": (lambda d: (d / SINGLE).unlink(), r"not a model directory: neither model\.safetensors nor"),
    "no directory": (shutil.rmtree, "no directory"),
    "pickled": (pickled, r"the weights are pickled \(pytorch_model\.bin\)"),
    "shard missing": (without_shard, r"the index names b\.safetensors for seen, but there is no such file"),
    "index nowhere": (lambda d: shards(d, seen="c.safetensors"), r"the index names c\.safetensors for seen, but"),
    "index outside": (lambda d: shards(d, seen="../b.safetensors"), r"places seen in '\.\./b\.safetensors', which"),
    "index wrong file": (lambda d: shards(d, seen="a.safetensors"), r"places seen in a\.safetensors, which does not"),
    "index incomplete": (without_index_entry, r"a\.safetensors holds scale, which the index does not list"),
    "index cut short": (lambda d: shards(d, lambda text: text[:-9]), "is cut short or no JSON"),
    "index empty": (lambda d: shards(d, lambda text: "{}"), "has no weight_map"),
}  # fmt: skip


@pytest.fixture(scope="module")
def own_plan():
    given = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": {"shape": [3], "dtype": "int64"}}}
    model = Own()
    return plan(model, Spec.load(given)), model


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_directory_is_one_error_that_names_the_file(case, tmp_path, own_plan):
    damage, words = DAMAGES[case]
    directory = write(tmp_path / "in", own_checkpoint())
    damage(directory)
    with pytest.raises(PlanError, match=words):
        check_pretrained(own_plan[0], directory)


def test_a_good_directory_of_several_files_passes_the_check(tmp_path, own_plan):
    directory = write(tmp_path / "in", own_checkpoint())
    shards(directory)
    check_pretrained(own_plan[0], directory)


# ---- names


@pytest.mark.parametrize(
    ("stored", "known", "wanted"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], ["a.w", "b.w"]),
        (["h.0.w", "h.1.w"], ["base.h.0.w", "base.h.1.w", "head.w"], ["base.h.0.w", "base.h.1.w"]),
        (["base.h.0.w", "base.h.1.w"], ["h.0.w", "h.1.w"], ["h.0.w", "h.1.w"]),
        (["h.0.w", "head.w"], ["base.h.0.w", "head.w"], ["base.h.0.w", "head.w"]),
        (["h.w"], ["encoder.h.w", "decoder.h.w"], ["h.w"]),
        (["x.w"], ["base.h.w"], ["x.w"]),
    ],
    ids=["equal", "prefix absent", "prefix present", "head beside", "ambiguous", "stranger"],
)
def test_names_match_up_to_one_prefix(stored, known, wanted):
    assert list(match_names(stored, set(known), HubFormat()).values()) == wanted


def test_names_that_transformers_has_changed_are_followed():
    hub = HubFormat(rename=lambda name: name.replace("gamma", "weight"))
    assert match_names(["norm.gamma"], {"norm.weight"}, hub) == {"norm.gamma": "norm.weight"}
    assert match_names(["norm.gamma"], {"norm.gamma"}, hub) == {"norm.gamma": "norm.gamma"}


def test_buffers_that_the_model_makes_itself_are_not_unexpected(tmp_path, own_plan):
    check_pretrained(own_plan[0], write(tmp_path / "in", {**own_checkpoint(), "table": torch.zeros(4)}))


# ---- Hugging Face families


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


def test_a_bfloat16_checkpoint_stays_one(tmp_path):
    model = ranks.save_random("llama", tmp_path / "in", dtype=torch.bfloat16)
    ranks.copy(tmp_path / "in", tmp_path / "out", {})
    again = type(model).from_pretrained(tmp_path / "out")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert_same(again.state_dict(), model.state_dict())


STEPS = ("llama", "gpt2", "bert", "t5")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> tuple[Path, list[list[Any]]]:
    """All cases of four ranks in one launch: per rank a list of results."""
    at = tmp_path_factory.mktemp("models")
    for family in STEPS:
        ranks.save_random(family, at / family)
    ranks.save_random("llama", at / "odd", vocab_size=41, num_key_value_heads=1)
    shutil.copytree(at / "llama", at / "broken")
    cut_short(at / "broken")
    (at / "file").write_text("")
    tp2_pp2 = {"tp": 2, "pp": 2}
    cases = [("step", {"source": at / f, "target": at / f"{f} after", "layout": tp2_pp2}) for f in STEPS]
    cases += [
        ("copy", {"source": at / "odd", "target": at / "odd 1", "layout": tp2_pp2, "max_shard_bytes": 5000}),
        ("copy", {"source": at / "odd 1", "target": at / "odd 2", "layout": {"tp": 4}}),
        ("copy", {"source": at / "odd 2", "target": at / "odd 3", "layout": {"pp": 2, "dp": 2}}),
        ("load_on_one_rank_broken", {"good": at / "llama", "broken": at / "broken", "layout": tp2_pp2}),
        ("save_where_it_cannot", {"source": at / "llama", "target": at / "file", "layout": tp2_pp2}),
    ]
    return at, launch(ranks.run_cases, 4, cases, timeout_seconds=550)


def on_four_ranks(test: Any) -> Any:
    """Slow: the first of these tests waits for four processes that plan nine times."""
    return pytest.mark.slow(pytest.mark.timeout(600)(test))


@on_four_ranks
@pytest.mark.parametrize("family", STEPS)
def test_load_one_step_save_and_transformers_gives_the_weights_of_one_process(family, four_ranks):
    at, results = four_ranks
    whole = load_model(f"hf:{at / family}", materialize=True).eval()
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    one = OneProcess(whole, Spec.load(ranks.spec_of()))
    loss = one.train_step(ranks.batch())
    assert [result[STEPS.index(family)] for result in results] == pytest.approx([loss] * 4, rel=1e-5)
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
    told = [result[len(STEPS) + 3] for result in four_ranks[1]]
    assert all("model.safetensors is cut short" in error for error, _ in told)
    assert "rank 1:" in told[0][0]
    assert all(unchanged for _, unchanged in told)


@on_four_ranks
def test_a_save_that_rank_0_cannot_write_is_an_error_on_every_rank(four_ranks):
    told = [result[len(STEPS) + 4] for result in four_ranks[1]]
    assert all("not a directory" in error for error in told)


# ---- command line


def test_verify_of_a_broken_directory_exits_2_before_any_process_starts(tmp_path):
    from typer.testing import CliRunner

    from runtime.cli import app

    ranks.save_random("gpt2", tmp_path / "in")
    cut_short(tmp_path / "in")
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(ranks.spec_of(tp=2)))
    result = CliRunner().invoke(app, ["verify", f"hf:{tmp_path / 'in'}", str(spec)])
    assert result.exit_code == 2, result.output
    assert "model.safetensors is cut short" in result.stderr
    assert "Traceback" not in result.output
