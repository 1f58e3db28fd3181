"""Tokenizer and configs go with a run's saves and exports; code, pickles and links that lead elsewhere do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime.checkpoint.conversion import import_weights
from runtime.checkpoint.manifest import checksum, read_manifest
from runtime.checkpoint.model_files import FOLDER, files_of_run, model_files, told_of, write_files
from runtime.commands.export import export_save
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import prepare_samples
from runtime.engine.prompts import tokenizer_in
from tests.tools.chat_tokenizers import chat_directory, talk
from tests.tools.checkpoints import own_checkpoint, write


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
