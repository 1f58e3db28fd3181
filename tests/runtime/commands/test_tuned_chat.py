"""Commands on the chat model of the examples: labels alone are scored, conversations become what its template makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from runtime.cli import app
from runtime.data.instruction.chat_tokenizer import ChatTokenizer
from runtime.data.token_file import read_header
from tests.tools.chat_tokenizers import talk
from tests.tools.paths import ROOT

pytest.importorskip("transformers")

CHAT = ROOT / "examples" / "chat"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the samples, and a spec of one process."""
    made = tmp_path_factory.mktemp("chat")
    spec = yaml.safe_load((ROOT / "examples" / "sft.yaml").read_text())
    (made / "spec.yaml").write_text(yaml.safe_dump(spec | {"mesh": {}}))
    texts = [str(CHAT / "chat.jsonl"), "--tokenizer", str(CHAT), "--chat", "messages"]
    ran("prepare", *texts, "-o", str(made / "sft.tokens"))
    return made


def ran(*words: str) -> Any:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    return found


@pytest.mark.thorough
def test_evaluate_scores_the_labels_alone(directory: Path) -> None:
    data = directory / "sft.tokens"
    given = [f"hf:{CHAT}", str(directory / "spec.yaml"), "--data", str(data), "--format", "json"]
    found = json.loads(ran("evaluate", *given).stdout)
    assert (found["num_scored"], found["num_ignored"], found["counted"]) == (240, 0, "labels")
    assert read_header(data).tokens > 240


@pytest.mark.thorough
def test_a_conversation_is_answered_as_its_rendered_text_is_continued(directory: Path) -> None:
    turns = talk("What is one plus one?", "It is two.", "Is that even?")
    (directory / "talk.json").write_text(json.dumps(turns))
    text = ChatTokenizer(str(CHAT)).render(turns, None, generates=True)
    given = ["generate", f"hf:{CHAT}", str(directory / "spec.yaml"), "--max-new-tokens", "4", "--format", "json"]
    answered = json.loads(ran(*given, "--messages", str(directory / "talk.json")).stdout)
    assert answered[0]["prompt"] == text
    assert answered == json.loads(ran(*given, "--prompt", text, "--tokenizer", str(CHAT)).stdout)


@pytest.mark.thorough
def test_a_run_on_samples_shows_texts_by_the_tokenizer_of_its_token_file(directory: Path) -> None:
    given = ["--data", str(directory / "sft.tokens"), "--steps", "2", "--sample-every", "2", "--quiet"]
    found = ran("train", f"hf:{CHAT}", str(directory / "spec.yaml"), *given, "--sample-prompt", "What is")
    assert "step 2 continues: What is" in found.stderr
