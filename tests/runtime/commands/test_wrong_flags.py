"""Each option for metrics, callbacks, validations, logs, schedules by hand and pairs, wrong in several ways: one error,
exit code 2, no traceback, and before the model is captured."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.cli import app

FIND = importlib.util.find_spec
MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) @ self.embed.weight.T
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
"""
OWN = """
def figures(log_probs, labels, batch):
    return {}

def row(row):
    pass

NUMBER = 3
"""
INPUTS = "inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, labels: {like: input_ids}}\n"
SPEC = "mesh: {}\nbatch: {global: 4, micro: 2}\n"
SETS = ("--validate-every", "1", "--validation-data", "a=text.txt")
TEXTS = (*SETS, "--metric", "own.py:figures:texts", "--prompts")
ORDER = "custom pp=2 vpp=1 microbatches=2\n0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 F1.0 B1.0\n"
FILES = {
    "model.py": MODEL, "own.py": OWN, "broken.py": "def f(:\n", "text.txt": "To train a model, a text is needed. " * 4,
    "empty.jsonl": "", "rows.jsonl": '{"question": "a"}\n', "half.jsonl": '{"prompt": "a"\n', "short.txt": "a",
    "order.txt": ORDER, "lost.txt": ORDER.replace("B1.0\n", "\n", 1), "words.txt": "F then B\n",
}  # fmt: skip
TRAIN: dict[str, dict[str, tuple[str, ...]]] = {
    "--callback": {
        "no 'absent' in own": ("own.py:absent",),
        "is a int, not a function": ("own.py:NUMBER",),
        "has an unknown form": ("own.py",),
        "takes (log_probs, labels, batch), and gets 2 or 1 arguments": ("own.py:figures",),
        "cannot be imported: SyntaxError": ("broken.py:f",),
    },
    "--metric": {
        "is a int, not a function": ("own.py:NUMBER", *SETS),
        "takes (row), and gets 3 arguments": ("own.py:row", *SETS),
        "has an unknown form": ("own.py", *SETS),
        "--metric applies to validations, but --validate-every is missing": ("own.py:figures",),
        "--prompts and --metric FILE.py:FUNCTION:texts need each other": ("own.py:figures:texts", *SETS),
    },
    "--prompts": {
        "--prompts and --metric FILE.py:FUNCTION:texts need each other": ("rows.jsonl", *SETS),
        "no.jsonl": ("no.jsonl", *TEXTS[:-1]),
        "has no prompt": ("empty.jsonl", *TEXTS[:-1]),
        "the row has no text 'prompt'": ("rows.jsonl", *TEXTS[:-1]),
        "a row cannot be read": ("half.jsonl", *TEXTS[:-1]),
    },
    "--validation-data": {
        "NAME=FILE": ("text.txt", "--validate-every", "1"),
        "no file or directory no.txt": ("a=no.txt", "--validate-every", "1"),
        "the name is repeated": ("a=text.txt", *SETS),
        "--validation-data applies to validations, but --validate-every is missing": ("a=text.txt",),
    },
    "--validate-every": {
        "'--validate-every': Input should be greater than or equal to 1": ("0",),
        "'--validate-every': Input should be a valid integer": ("x",),
        "the spec holds out none": ("2",),
    },
    "--patience": {
        "'--patience': Input should be greater than or equal to 1": ("0", *SETS),
        "'--patience': Input should be a valid integer": ("1.5", *SETS),
        "--patience needs a validation loss": ("2",),
    },
    "--keep-best": {
        "--keep-best needs a validation loss": ("--save", "run"),
        "No such option: --keep-bets": ("--keep-bets", *SETS),
        "text.txt": ("--save", "text.txt", *SETS),
    },
    "--tensorboard": {
        "requires an argument": (),
        "cannot write the directory text.txt: ": ("text.txt",),
        "cannot write the directory text.txt/logs: ": ("text.txt/logs",),
    },
    "--wandb": {
        "is not PROJECT or PROJECT/NAME": ("",),
        "a/b/c is not PROJECT or PROJECT/NAME": ("a/b/c",),
        "a?b is not PROJECT or PROJECT/NAME": ("a?b",),
    },
}  # fmt: skip
SCHEDULES = {
    "there is no schedule file no.txt": "{file: no.txt}",
    "misses B1.0": "{file: lost.txt}",
    "not with its sizes": "{file: words.txt}",
    "is for pp 2, vpp 1, 2 microbatches": "{file: order.txt}",
    "pipeline.schedule cannot be": "3",
}
PAIRS: dict[str, tuple[str, ...]] = {
    "--chosen and --rejected go together": ("--chosen", "a"),
    "four kinds of rows": ("--chosen", "a", "--rejected", "b", "--chat", "c"),
    "answers need the model's tokenizer": ("--chosen", "a", "--rejected", "b"),
    "requires an argument": ("--chosen",),
}
CASES = [(flag, words) for flag, wrong in TRAIN.items() for words in wrong]


@pytest.fixture(autouse=True)
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls of torch.export, in a directory of small files; wandb seems to be installed."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "spec.yaml").write_text(SPEC + INPUTS)
    monkeypatch.chdir(tmp_path)
    found = list[Any]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "wandb" or FIND(name, *more))
    monkeypatch.setattr(torch.export, "export", lambda *given, **more: found.append(given))
    return found


def check(words: str, *given: str) -> None:
    result = CliRunner().invoke(app, given)
    told = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, told
    assert words in told
    assert "Traceback" not in told
    assert told.count("Error") - told.count("cannot be imported: ") == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("flag", "words"), CASES)
def test_an_option_of_train_is_refused(flag: str, words: str, captures: list[Any]) -> None:
    given = TRAIN[flag][words]
    options = given if given[:1] == ("--keep-bets",) else (flag, *given)
    check(words, "train", "model.py:Model", "spec.yaml", "--data", "text.txt", "--steps", "2", *options)
    assert not captures


def test_each_option_is_wrong_in_three_ways() -> None:
    assert all(len(wrong) >= 3 for wrong in (*TRAIN.values(), SCHEDULES, PAIRS))


@pytest.mark.parametrize("words", SCHEDULES)
def test_a_schedule_by_hand_is_refused(words: str, captures: list[Any], tmp_path: Path) -> None:
    spec = SPEC.replace("micro: 2", "micro: 1" if "is for" in words else "micro: 2").replace("{}", "{pp: 2}")
    (tmp_path / "spec.yaml").write_text(f"{spec}{INPUTS}pipeline: {{schedule: {SCHEDULES[words]}}}\n")
    check(words, "plan", "model.py:Model", "spec.yaml", "--format", "schedule")
    assert not captures


@pytest.mark.parametrize("words", PAIRS)
def test_options_of_pairs_are_refused(words: str) -> None:
    check(words, "prepare", "rows.jsonl", "-o", "out.tokens", *PAIRS[words])
    assert not Path("out.tokens").exists()


BAD: dict[str, tuple[str, ...]] = {
    "--wandb needs the package wandb": ("train", "--wandb", "project"),
    "module 'x' cannot be imported": ("train", "--callback", "x:nope"),
    "the planned model has no adapters": ("train", "--save-adapters", "adapters"),
    "prompt 0 has 9 tokens, and a planned sequence has 8": (
        "train", "--sample-every", "2", "--sample-prompt", "To train ",
    ),
    "needs an input by which the model knows where a document begins": ("train", "--packing"),
    "its role is unknown": ("train", "--strange"),
    "packing: documents needs an input": ("plan", "--packing"),
    "the plan has no length 5: it has one length": ("plan", "--length", "5"),
    "--full adds rows to tables": ("plan", "--full", "--format", "json"),
    "fix: remove --full, or --why and --format": ("plan", "--full", "--why", "embed.weight"),
    "--case reruns one case: --cases, --seed has no effect": (
        "fuzz", "--case", "case.json", "--cases", "2", "--seed", "3",
    ),
    "prompt 0 has 8 tokens": ("generate", "--prompt", "To train"),
    "prompt 1 is empty": ("generate", "--prompt", "To", "--prompt", ""),
    "max_new_tokens is 0": ("generate", "--prompt", "To", "--max-new-tokens", "0"),
    "and with 7 new ones more than the 8": ("generate", "--prompt", "To", "--max-new-tokens", "7"),
}  # fmt: skip
OF_LAUNCHER = {"--nproc": ("--nproc", "2"), "--show-plan": ("--show-plan",), "--max-restarts": ("--max-restarts", "1")}
OF_SPEC = {"--packing": INPUTS + "data: {packing: documents}\n", "--strange": INPUTS.replace("labels: ", "mine: ")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", BAD)
def test_it_is_refused_without_a_capture(
    words: str, captures: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "wandb" in words:
        monkeypatch.setattr(importlib.util, "find_spec", FIND)
        if FIND("wandb") is not None:
            pytest.skip("wandb is installed")
    command, *options = BAD[words]
    keys = next((OF_SPEC[option] for option in options if option in OF_SPEC), INPUTS)
    (tmp_path / "spec.yaml").write_text(SPEC + keys)
    data = ["--data", "text.txt", "--steps", "2"] if command == "train" else []
    more = [option for option in options if option not in OF_SPEC]
    check(words, command, "model.py:Model", "spec.yaml", *data, *more)
    assert not captures


@pytest.mark.parametrize("option", OF_LAUNCHER)
def test_an_option_about_local_processes_is_refused_under_a_launcher(
    option: str, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    given = ("--data", "text.txt", "--steps", "2", *OF_LAUNCHER[option])
    check(f"{option} has no effect under a launcher", "train", "model.py:Model", "spec.yaml", *given)
    assert not captures


@pytest.mark.parametrize("option", [("--ema",), ("--names", "model")])
def test_an_option_of_an_export_is_refused_without_one(option: tuple[str, ...]) -> None:
    check(f"{option[0]} applies to --export, which is not given", "checkpoint", "run", *option)
