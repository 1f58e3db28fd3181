"""``meshwright export`` and ``import``: Hugging Face directories to saves and back, in one process, in buckets."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from planner import PlanError, plan, progress
from planner.capture.model.reference import load_model
from planner.progress import shown_if_slow
from runtime import Engine
from runtime.checkpoint import conversion, pretrained_load, pretrained_save
from runtime.checkpoint.conversion import import_weights
from runtime.checkpoint.manifest import checksum, read_manifest
from runtime.checkpoint.model_files import FOLDER, files_of_run, model_files, told_of, write_files
from runtime.checkpoint.saves import verify
from runtime.checkpoint.training_state import owned_runs
from runtime.cli import app
from runtime.commands import export
from runtime.commands.export import export_save
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import prepare_samples
from runtime.engine.prompts import tokenizer_in
from tests.tools.chat_tokenizers import chat_directory, talk
from tests.tools.checkpoints import Own, own_checkpoint, own_engine, write
from tests.tools.limits import HANG_SECONDS

SPEC: dict[str, Any] = {
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 61}, "labels": {"like": "input_ids"}},
    "mesh": {"dp": 1},
    "optimizer": {"lr": 1.0e-2},
}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def batch() -> dict[str, Tensor]:
    ids = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A tied GPT-2 as transformers writes it."""
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=61, n_positions=16, dtype="float32")
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def engine_of(weights: Path, **more: Any) -> Engine:
    return Engine(plan(load_model(f"hf:{weights}"), SPEC | more))


def assert_equal_files(found: Path, expected: Path) -> None:
    own, others = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert own.keys() == others.keys()
    for name, value in others.items():
        assert own[name].dtype == value.dtype
        assert own[name].equal(value), name


@pytest.mark.thorough
def test_an_imported_save_trains_as_the_directory_does(weights, tmp_path):
    """A save of weights alone: a load of it is a load of the directory, for a higher precision of the optimizer too."""
    assert run("import", weights, tmp_path / "run").exit_code == 0
    for more in ({}, {"optimizer": {"lr": 1.0e-2, "name": "lion"}}, {"precision": {"parameters": "float64"}}):
        with engine_of(weights, **more) as engine:
            engine.load_pretrained(weights)
            expected = [engine.train_step(batch()).loss for _ in range(3)]
        with engine_of(weights, **more) as engine:
            engine.train_step(batch())
            engine.load(tmp_path / "run")
            assert engine.step_index == 0
            assert [engine.train_step(batch()).loss for _ in range(3)] == expected


def test_weights_in_half_precision_take_main_values_from_the_files(weights, tmp_path):
    import_weights(weights, tmp_path / "run")
    stored = load_file(weights / "model.safetensors")
    with engine_of(weights, precision={"parameters": "bfloat16"}) as engine:
        engine.load(tmp_path / "run")
        shard = engine.optimizer.shards[0]
        values = stored["transformer.wte.weight"]
        assert engine.gather_parameters()["transformer.wte.weight"].equal(values.bfloat16())
        runs = {run.local.fqn: run.values["main"] for run in owned_runs(engine.optimizer)}
        assert runs["transformer.wte.weight"].view(values.shape).equal(values)
        assert shard.owns_main


def test_export_gives_back_what_import_took(weights, tmp_path):
    assert run("import", weights, tmp_path / "run").exit_code == 0
    found = run("export", tmp_path / "run", tmp_path / "back")
    assert found.exit_code == 0
    assert "step-00000000 → " in found.output
    assert_equal_files(tmp_path / "back", weights)
    assert run("checkpoint", tmp_path / "run", "--export", tmp_path / "again").exit_code == 0
    assert_equal_files(tmp_path / "again", weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "gpt2"
    assert run("checkpoint", tmp_path / "run", "--verify").exit_code == 0


def test_one_bucket_is_in_memory_at_a_time(weights, tmp_path, monkeypatch):
    most, real = 0, conversion.write_pieces

    def write_pieces(directory: Path, number: int, pieces: Any, *rest: Any) -> Any:
        nonlocal most
        held = [piece.values for piece in pieces]
        most = max(most, sum(value.nbytes for value in held)) if len(held) > 1 else most
        return real(directory, number, pieces, *rest)

    monkeypatch.setattr(conversion, "write_pieces", write_pieces)
    save, num_tensors = import_weights(weights, tmp_path / "run", bucket_bytes=3000)
    assert 0 < most <= 3000
    assert num_tensors == len(verify(save).tensors)
    assert len(verify(save).files) > 3
    with engine_of(weights) as engine:
        engine.load(tmp_path / "run")
        assert engine.gather_parameters()["transformer.wpe.weight"].equal(
            load_file(weights / "model.safetensors")["transformer.wpe.weight"]
        )


def changed(weights: Path, change: Any) -> None:
    tensors = load_file(weights / "model.safetensors")
    change(tensors)
    save_file(tensors, weights / "model.safetensors", {"format": "pt"})


BAD = {
    "absent": (lambda tensors: tensors.pop("transformer.ln_f.bias"), "absent: transformer.ln_f.bias"),
    "left over": (lambda tensors: tensors.update(odd=torch.ones(2)), "unexpected in model.safetensors: odd"),
    "of another shape": (
        lambda tensors: tensors.update({"transformer.ln_f.bias": torch.ones(5)}),
        "transformer.ln_f.bias in model.safetensors has shape [5], the model has [16]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_tensor_that_does_not_fit_is_one_error(weights, tmp_path, case):
    change, words = BAD[case]
    changed(weights, change)
    found = run("import", weights, tmp_path / "run")
    assert found.exit_code == 2
    assert words in found.output
    assert not (tmp_path / "run").exists()


def test_bad_directories_are_refused(weights, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "not a model directory" in run("import", tmp_path / "empty", tmp_path / "run").output
    assert "the directory has no saves" in run("export", tmp_path / "empty", tmp_path / "out").output
    assert run("export", tmp_path / "empty", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()
    import_weights(weights, tmp_path / "run")
    with pytest.raises(PlanError, match="already has saves: step-00000000"):
        import_weights(weights, tmp_path / "run")
    (weights / "config.json").unlink()
    with pytest.raises(PlanError, match=r"no config\.json, which names its model"):
        import_weights(weights, tmp_path / "other")


def test_the_model_may_be_named(weights, tmp_path):
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n\n\ndef build():\n"
        "    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=61, n_positions=16))\n"
    )
    (weights / "config.json").unlink()
    found = run("import", weights, tmp_path / "run", "--model", f"{tmp_path / 'own.py'}:build")
    assert found.exit_code == 0, found.output
    assert "lm_head.weight" in verify(tmp_path / "run" / "step-00000000").tensors["transformer.wte.weight"].aliases


def test_files_of_the_directory_and_of_the_samples_are_copied_by_content(tmp_path: Path) -> None:
    model, outside = chat_directory(tmp_path / "model", "chatml", ends=["<|endoftext|>"]), tmp_path / "secret.json"
    outside.write_text("{}")
    for name in ("modeling.py", "model.safetensors.index.json", "pytorch_model.bin", "config.json"):
        (model / name).write_text("{}")
    (model / "preprocessor_config.json").write_text('{"auto_map": {"x": "y.Z"}, "size": 3}')
    (model / "linked.json").symlink_to(outside)
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": talk("a", "b")}))
    tokens = tmp_path / "sft.tokens"
    prepare_samples([tmp_path / "c.jsonl"], tokens, str(model), Instruction("messages"))
    found = model_files(f"hf:{model}", [str(tokens)])
    assert found.keys() == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
        "preprocessor_config.json",
    }  # fmt: skip
    assert json.loads(found["preprocessor_config.json"]) == {"size": 3}
    assert len(json.loads(found["generation_config.json"])["eos_token_id"]) == 2  # with the end that is trained
    write_files(found, tmp_path / "run" / FOLDER)
    write_files(files_of_run(tmp_path / "run" / "step-00000001"), tmp_path / "out")
    for name, content in found.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert (told_of(found, "out"), "has no tokenizer" in told_of({}, "out")) == ("", True)
    assert files_of_run(tmp_path / "none" / "step-00000001") == model_files("m.py:build", ["stdlib"]) == {}
    with tokenizer_in(str(tokens)) as place:
        assert Path(place, "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_files_of_a_snapshot_in_the_cache_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for place, name in ((blobs / "0a", "tokenizer.json"), (tmp_path / "secret.json", "added_tokens.json")):
        place.write_text("{}")
        (snapshot / name).symlink_to(place)
    assert model_files(f"hf:{snapshot}", []).keys() == {"tokenizer.json"}


def test_a_save_lists_the_files_and_an_export_tells_those_that_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    weights = write(tmp_path / "in", own_checkpoint())
    names = ("tokenizer.json", "vocab.txt", "merges.txt")
    for name in names:
        (weights / name).write_text(name)
    (tmp_path / "own.py").write_text("from tests.tools.checkpoints import Own\n")
    save, _ = import_weights(weights, tmp_path / "run", f"{tmp_path / 'own.py'}:Own")
    listed = {file.name: (file.bytes, file.checksum) for file in read_manifest(save)[0].model_files}
    assert listed == {
        name: (len(name), checksum(name.encode())) for name in ("tokenizer.json", "vocab.txt", "merges.txt")
    }
    export_save(tmp_path / "run", tmp_path / "out", ema=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert "saved" not in capsys.readouterr().err
    (tmp_path / "run" / FOLDER / "tokenizer.json").write_text("other")
    (tmp_path / "run" / FOLDER / "vocab.txt").unlink()
    export_save(tmp_path / "run", tmp_path / "again", ema=False)
    told = capsys.readouterr().err
    assert f"files/tokenizer.json was changed after {save.name} was saved" in told
    assert f"files/vocab.txt is absent, but was there when {save.name} was saved" in told
    assert "merges" not in told
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "other"


@contextmanager
def told_at_once(what: str) -> Iterator[None]:
    with shown_if_slow(what, after_seconds=0.0):
        step = progress._step.get()
        assert step is not None
        assert step.is_told.wait(HANG_SECONDS)
        yield


def test_loading_importing_checking_and_writing_tell_their_bytes_a_second(tmp_path, capsys, monkeypatch):
    for module in (conversion, pretrained_load, pretrained_save, export):
        monkeypatch.setattr(module, "shown_if_slow", told_at_once)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    weights = write(tmp_path / "in", own_checkpoint())
    own_engine(Own()).load_pretrained(weights)
    (tmp_path / "own.py").write_text("from tests.tools.checkpoints import Own\n")
    import_weights(weights, tmp_path / "run", f"{tmp_path / 'own.py'}:Own")
    export.export_save(tmp_path / "run", tmp_path / "out", ema=False)
    told = capsys.readouterr().err
    for what in ("loading .*in", "importing .*in", "verifying step-00000000", "writing .*out"):
        assert re.search(rf"^{what}: \d+\.\d\d GB, \d+\.\d\d GB/s, \d+\.\d s$", told, re.MULTILINE), (what, told)
