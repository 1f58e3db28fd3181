"""Tokenizer and configs go with a run's saves and exports; code, pickles and links that lead elsewhere do not."""

from __future__ import annotations

import json
from pathlib import Path

from runtime.checkpoint.conversion import FOLDER, files_of_run, model_files, told_of, write_files
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import prepare_samples
from runtime.engine.prompts import tokenizer_in
from tests.tools.chat_tokenizers import chat_directory, talk


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
