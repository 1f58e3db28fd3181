"""`meshwright evaluate` and `generate`: what they print is what the model itself finds; bad input is one message."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from examples.gpt import GPT
from runtime.cli import app
from runtime.data.reading import read_tokens
from tests.tools.commands import python
from tests.tools.generation_jobs import greedy
from tests.tools.score_jobs import Alone

TEXT = "The ship goes down to the sea. Over the sea it goes, and no one is on the ship.\n"
MODEL = """
import torch
from examples.gpt import GPT

def build():
    torch.manual_seed(1)
    model = GPT(256, 16, 32, 2, 4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
"""
SPEC = """
mesh: {}
batch: {global: 4, micro: 2}
inputs:
  input_ids: {shape: [16], dtype: int64, high: 256}
  targets: {like: input_ids}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "text.txt").write_text(TEXT)
    passages = tmp_path / "passages"
    passages.mkdir()
    for number, line in enumerate(("a b a b", "it is what it is", "one", "so long, and thanks for all the fish")):
        (passages / f"{number}.txt").write_text(line + "\n")
    return tmp_path


def ran(files: Path, *options: str, code: int = 0, command: str = "evaluate") -> Any:
    result = CliRunner().invoke(app, [command, f"{files}/model.py:build", f"{files}/spec.yaml", *options])
    assert result.exit_code == code, result.output
    return result


def alone(source: Path, weights: Path | None = None) -> Alone:
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    model: GPT = namespace["build"]()
    if weights is not None:
        missing = model.load_state_dict(load_file(weights), strict=False).missing_keys
        assert missing == ["head.weight"]  # tied: it stands under its first name
    return Alone(lambda ids: model(ids)[0], read_tokens(str(source)), 17)


def test_perplexity_is_that_of_the_definition(files: Path) -> None:
    found = json.loads(ran(files, "--data", f"{files}/text.txt", "--stride", "4", "--format", "json").stdout)
    truth = alone(files / "text.txt")
    assert found["perplexity"] == pytest.approx(truth.perplexity(4), rel=1e-5)  # a sum of 81 in float32, over 18 words
    assert (found["num_original"], found["num_scored"]) == (len(TEXT.split()), len(TEXT))
    assert found["log_probability"] < 0


@pytest.mark.thorough
def test_the_original_tokens_may_be_told(files: Path) -> None:
    options = ("--data", f"{files}/text.txt", "--format", "json", "--stride", "16", "--original-tokens", str(len(TEXT)))
    found = json.loads(ran(files, *options).stdout)
    assert found["perplexity"] == pytest.approx(found["perplexity_of_tokens"])


@pytest.mark.thorough
def test_cloze_accuracy_is_that_of_the_definition(files: Path) -> None:
    found = json.loads(ran(files, "--data", f"{files}/passages", "--cloze", "--format", "json").stdout)
    assert (found["num_passages"], found["num_cut"]) == (3, 1)
    assert found["left_out"] == {"it has nothing before its last word": 1}
    assert found["accuracy"] == found["num_right"] / 3
    table = ran(files, "--data", f"{files}/passages", "--cloze").stdout
    assert "left out" in table


@pytest.mark.thorough
def test_a_model_of_the_last_save_is_scored(files: Path) -> None:
    """A run of one step at a rate of 1 changes what is found."""
    spec = files / "spec.yaml"
    spec.write_text(SPEC + "optimizer: {name: adamw, lr: 1.0e-2}\n")
    given = [f"{files}/model.py:build", str(spec)]
    trained = CliRunner().invoke(
        app, ["train", *given, "--data", f"{files}/text.txt", "--steps", "1", "--save", f"{files}/run"]
    )
    assert trained.exit_code == 0, trained.output
    options = ("--data", f"{files}/text.txt", "--format", "json", "--stride", "16")
    before, after = (
        json.loads(ran(files, *options, *load).stdout)["perplexity_of_tokens"]
        for load in ((), ("--load", f"{files}/run"))
    )
    assert after < 0.99 * before


@pytest.mark.thorough
def test_the_running_mean_of_a_save_is_scored(files: Path) -> None:
    """As the weights that ``checkpoint --export --ema`` writes, under a spec that has no mean itself."""
    spec = files / "spec.yaml"
    spec.write_text(SPEC + "optimizer: {name: adamw, lr: 1.0e-2, ema: 0.5}\n")
    given = [f"{files}/model.py:build", str(spec), "--data", f"{files}/text.txt"]
    trained = CliRunner().invoke(app, ["train", *given, "--steps", "3", "--save", f"{files}/run"])
    assert trained.exit_code == 0, trained.output
    spec.write_text(SPEC)
    options = ("--data", f"{files}/text.txt", "--format", "json", "--stride", "16", "--load", f"{files}/run")
    last, mean = (json.loads(ran(files, *options, *ema).stdout)["perplexity"] for ema in ((), ("--ema",)))
    exported = CliRunner().invoke(app, ["checkpoint", f"{files}/run", "--export", f"{files}/mean", "--ema"])
    assert exported.exit_code == 0, exported.output
    truth = alone(files / "text.txt", files / "mean" / "model.safetensors").perplexity(16)
    assert mean == pytest.approx(truth, rel=1e-5)
    assert last != pytest.approx(truth, rel=1e-3)


@pytest.mark.thorough
def test_a_mean_that_nobody_saved_is_not_scored(files: Path) -> None:
    given = [f"{files}/model.py:build", f"{files}/spec.yaml", "--data", f"{files}/text.txt"]
    assert CliRunner().invoke(app, ["train", *given, "--steps", "1", "--save", f"{files}/run"]).exit_code == 0
    options = ("--data", f"{files}/text.txt", "--ema")
    assert "add --load DIR" in ran(files, *options, code=2).stderr
    assert "has no running mean" in ran(files, *options, "--load", f"{files}/run", code=2).stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--data", "{files}/text.txt", "--stride", "17"], "a window predicts 16 tokens, so that a stride of 17"),
        (["--data", "{files}/text.txt", "--cloze", "--stride", "4"], "--stride applies to perplexity only"),
        (["--data", "{files}/text.txt", "--cloze", "--perplexity"], "--perplexity and --cloze cannot be combined"),
        (["--data", "{files}/none.txt"], "no file or directory"),
        (["--data", "{files}/space.txt"], "has no words to normalize by"),
        (["--data", "{files}/one.txt", "--cloze"], "has no passage with a last word to predict"),
        (["--data", "{files}/text.txt", "--load", "{files}/nowhere"], "nowhere"),
        (["--data", "{files}/text.txt", "--nproc", "2"], "--nproc 2, but the mesh needs 1 processes"),
    ],
)
def test_bad_input_is_one_message(files: Path, options: list[str], what: str) -> None:
    (files / "one.txt").write_text("word")
    (files / "space.txt").write_text("  \n  ")
    result = ran(files, *(option.format(files=files) for option in options), code=2)
    assert what in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("", "data: {inputs: {targets: segments}}"), "the input 'targets' is fed by segments"),
        (("SPEC", "data: {objective: masked}"), "data.objective is masked"),
        (
            ("targets", "data: {inputs: {targets: labels}}"),
            "from a window that contains it: it does not shift its labels",
        ),
    ],
)
def test_a_spec_of_another_task_is_refused(files: Path, change: tuple[str, str], what: str) -> None:
    text = SPEC + change[1] if change[1].startswith("data:") else SPEC.replace(*change)
    (files / "spec.yaml").write_text(text + "\n")
    result = ran(files, "--data", f"{files}/text.txt", "--stride", "8", code=2)
    assert what in result.stderr


def test_ids_that_the_model_does_not_have_are_refused(files: Path) -> None:
    (files / "model.py").write_text(MODEL.replace("256", "100"))
    result = ran(files, "--data", f"{files}/text.txt", code=2)
    assert "has the id 104 at position 1" in result.stderr
    assert "the embedding tokens has rows 0 to 99" in result.stderr


def test_a_damaged_token_file_is_refused(files: Path) -> None:
    tokens = files / "text.tokens"
    made = CliRunner().invoke(app, ["prepare", f"{files}/text.txt", "-o", str(tokens)])
    assert made.exit_code == 0, made.output
    content = bytearray(tokens.read_bytes())
    content[content.index(b"ship")] ^= 1
    tokens.write_bytes(content)
    assert "damaged" in ran(files, "--data", str(tokens), code=2).stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_processes_that_it_starts_find_what_one_does(files: Path) -> None:
    options = ("--data", f"{files}/text.txt", "--stride", "8", "--format", "json")
    one = json.loads(ran(files, *options).stdout)
    (files / "spec.yaml").write_text(SPEC.replace("mesh: {}", "mesh: {tp: 2}"))
    result = python("-m", "runtime.cli", "evaluate", f"{files}/model.py:build", f"{files}/spec.yaml", *options)
    two = json.loads(result.stdout)
    assert two["log_probability"] == pytest.approx(one["log_probability"], rel=1e-6)
    assert {k: v for k, v in two.items() if k.startswith("num")} == {
        k: v for k, v in one.items() if k.startswith("num")
    }
    assert "no --load: using the initial weights of" in result.stderr


TEXTS = ("The sea", "On", "A ship is")


def test_prompts_are_continued_as_the_model_does(files: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    prompts = [option for text in TEXTS for option in ("--prompt", text)]
    found = json.loads(ran(files, *prompts, "--max-new-tokens", "6", "--format", "json", command="generate").stdout)
    expected = greedy(namespace["build"](), [list(text.encode()) for text in TEXTS], 6)
    for text, each, tokens in zip(TEXTS, found, expected, strict=True):
        tokens = tokens[: tokens.index(0) + 1] if 0 in tokens else tokens  # 0 ends a text of bytes
        assert (each["prompt"], each["tokens"], each["is_stopped"]) == (text, tokens, tokens[-1] == 0)
    whole = ran(files, *prompts, "--max-new-tokens", "6", "--format", "json", "--no-kv-cache", command="generate")
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
def test_a_bad_prompt_is_one_message(files: Path, words: str) -> None:
    output = ran(files, *BAD[words], code=2, command="generate").output
    assert "Traceback" not in output
    assert words in output


@pytest.mark.thorough
def test_a_training_run_shows_how_its_model_writes(files: Path) -> None:
    """The last sample is the text that the saved model continues with."""
    (files / "text.txt").write_text("The ship goes down to the sea. " * 20)
    options = ["--data", f"{files}/text.txt", "--steps", "4", "--quiet", "--save", f"{files}/run"]
    given = ["train", f"{files}/model.py:build", f"{files}/spec.yaml", *options]
    trained = CliRunner().invoke(app, [*given, "--sample-every", "2", "--sample-prompt", "The sea"])
    assert trained.exit_code == 0, trained.output
    shown = [line for line in trained.stderr.splitlines() if "continues: The sea" in line]
    assert [line.partition(" continues")[0] for line in shown] == ["step 2", "step 4"]
    found = ran(files, "--load", f"{files}/run", "--prompt", "The sea", command="generate").stdout
    assert found.splitlines()[0] == shown[-1].partition("continues: ")[2]
    alone = CliRunner().invoke(app, [*given, "--sample-every", "2", "--resume", "auto"])
    assert alone.exit_code == 2
    assert "add --sample-prompt TEXT" in alone.output
