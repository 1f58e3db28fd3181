"""Hugging Face directories in and out: the weights of one process from any layout, bitwise, and nothing by half."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from planner import PlanError, meta_parameters, plan
from planner.spec.spec import Spec
from runtime.checkpoint.conversion import export
from runtime.checkpoint.pretrained_load import check_pretrained, match_names
from runtime.checkpoint.pretrained_save import README
from runtime.checkpoint.safetensors_files import INDEX, SINGLE
from runtime.checkpoint.saves import resolve, verify
from tests.tools import pretrained_ranks as ranks

pytest.importorskip("transformers")


from tests.tools.checkpoints import Own, assert_same, cut_short, own_checkpoint, own_engine, write


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
    assert names == [README, *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), INDEX]
    assert_same(ranks.stored(tmp_path / "many"), ranks.stored(tmp_path / "one"))


def test_an_export_of_a_tied_model_says_how_it_loads(tmp_path, monkeypatch):
    engine = own_engine(Own())
    engine.save_pretrained(tmp_path / "out", max_shard_bytes=80)
    engine.save(tmp_path / "run")
    save = resolve(tmp_path / "run")
    export(save, verify(save), tmp_path / "exported")
    text = (tmp_path / "out" / README).read_text()
    assert "strict=False" in text
    assert "- head.weight: embed.weight" in text
    assert (tmp_path / "exported" / README).read_text() == text
    model = Own()
    monkeypatch.chdir(tmp_path / "out")
    exec("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")), {"model": model})
    assert_same(dict(model.named_parameters(remove_duplicate=False)), engine.gather_parameters())
    (tmp_path / "out" / README).write_text("my own")
    engine.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / README).read_text() == "my own"


def test_a_save_replaces_an_older_one_and_keeps_other_peoples_files(tmp_path):
    engine = own_engine(Own())
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "words.txt").write_text("words")
    engine.save_pretrained(tmp_path, max_shard_bytes=80)
    engine.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [README, SINGLE, "tokenizer"]
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
    "cut short": (cut_short, r"model\.safetensors is truncated or not a safetensors file"),
    "empty file": (lambda d: (d / SINGLE).write_bytes(b""), r"model\.safetensors is truncated"),
    "text": (lambda d: (d / SINGLE).write_text("version https://git-lfs"), r"model\.safetensors is truncated or not "),
    "no weights": (lambda d: (d / SINGLE).unlink(), r"not a model directory: neither model\.safetensors nor"),
    "no directory": (shutil.rmtree, "no directory"),
    "pickled": (pickled, r"the weights are pickled \(pytorch_model\.bin\)"),
    "shard missing": (without_shard, r"the index names b\.safetensors for seen, but there is no such file"),
    "index nowhere": (lambda d: shards(d, seen="c.safetensors"), r"the index names c\.safetensors for seen, but"),
    "index outside": (lambda d: shards(d, seen="../b.safetensors"), r"places seen in '\.\./b\.safetensors', which"),
    "index wrong file": (lambda d: shards(d, seen="a.safetensors"), r"places seen in a\.safetensors, which does not"),
    "index incomplete": (without_index_entry, r"a\.safetensors holds scale, which the index does not list"),
    "index cut short": (lambda d: shards(d, lambda text: text[:-9]), "the index is damaged or truncated"),
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
    assert list(match_names({name: [] for name in stored}, set(known))) == wanted


def test_buffers_that_the_model_makes_itself_are_not_unexpected(tmp_path, own_plan):
    check_pretrained(own_plan[0], write(tmp_path / "in", {**own_checkpoint(), "table": torch.zeros(4)}))
