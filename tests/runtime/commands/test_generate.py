"""`meshwright generate`: the text is what the model itself continues with; bad input is one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from tests.tools.generation_jobs import greedy

MODEL = """
import torch
from examples.gpt import GPT

def build():
    torch.manual_seed(1)
    model = GPT(256, 16, 32, 1, 2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
"""
SPEC = """
mesh: {}
batch: {global: 2, micro: 2}
inputs:
  input_ids: {shape: [16], dtype: int64, high: 256}
  targets: {like: input_ids}
"""
TEXTS = ("The sea", "On", "A ship is")


def ran(directory: Path, *options: str, code: int = 0) -> Any:
    (directory / "model.py").write_text(MODEL)
    (directory / "spec.yaml").write_text(SPEC)
    given = ["generate", f"{directory}/model.py:build", f"{directory}/spec.yaml", *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == code, result.output
    return result


def test_prompts_are_continued_as_the_model_does(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    prompts = [option for text in TEXTS for option in ("--prompt", text)]
    found = json.loads(ran(tmp_path, *prompts, "--max-new-tokens", "6", "--format", "json").stdout)
    expected = greedy(namespace["build"](), [list(text.encode()) for text in TEXTS], 6)
    for text, each, tokens in zip(TEXTS, found, expected, strict=True):
        tokens = tokens[: tokens.index(0) + 1] if 0 in tokens else tokens  # 0 ends a text of bytes
        assert (each["prompt"], each["tokens"], each["is_stopped"]) == (text, tokens, tokens[-1] == 0)
    whole = ran(tmp_path, *prompts, "--max-new-tokens", "6", "--format", "json", "--no-kv-cache")
    assert json.loads(whole.stdout) == found
    assert "are not kept" not in whole.stderr


BAD: dict[str, tuple[str, ...]] = {
    "prompt 0 has 17 tokens": ("--prompt", "a" * 17, "--max-new-tokens", "1"),
    "at:  --prompt\n": ("--prompt", "a", "--prompt", ""),
    "prompt 1 is empty": ("--prompt", "a", "--prompt", ""),
    "the temperature is -1.0": ("--prompt", "a", "--temperature", "-1"),
    "top_p is 2.0": ("--prompt", "a", "--temperature", "1", "--top-p", "2"),
    "--ema selects the weights of a save": ("--prompt", "a", "--ema"),
    "nothing to load": ("--prompt", "a", "--load", "nowhere"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_message(tmp_path: Path, words: str) -> None:
    output = ran(tmp_path, *BAD[words], code=2).output
    assert "Traceback" not in output
    assert words in output


@pytest.mark.thorough
def test_a_training_run_shows_how_its_model_writes(tmp_path: Path) -> None:
    """The last sample is the text that the saved model continues with."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "text.txt").write_text("The ship goes down to the sea. " * 20)
    options = ["--data", f"{tmp_path}/text.txt", "--steps", "4", "--quiet", "--save", f"{tmp_path}/run"]
    given = ["train", f"{tmp_path}/model.py:build", f"{tmp_path}/spec.yaml", *options]
    trained = CliRunner().invoke(app, [*given, "--sample-every", "2", "--sample-prompt", "The sea"])
    assert trained.exit_code == 0, trained.output
    shown = [line for line in trained.stderr.splitlines() if "continues: The sea" in line]
    assert [line.partition(" continues")[0] for line in shown] == ["step 2", "step 4"]
    found = ran(tmp_path, "--load", f"{tmp_path}/run", "--prompt", "The sea").stdout
    assert found.splitlines()[0] == shown[-1].partition("continues: ")[2]
    alone = CliRunner().invoke(app, [*given, "--sample-every", "2", "--resume", "auto"])
    assert alone.exit_code == 2
    assert "add --sample-prompt TEXT" in alone.output
