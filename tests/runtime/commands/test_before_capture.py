"""Options that no plan could make right are refused before the model is captured, which takes most of the time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from runtime.cli import app

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
INPUTS = "inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, labels: {like: input_ids}}\n"
SPEC = "mesh: {}\nbatch: {global: 4, micro: 2}\n"
BAD: dict[str, tuple[str, ...]] = {
    "--wandb needs the package wandb": ("train", "--wandb", "project"),
    "module 'x' cannot be imported": ("train", "--callback", "x:nope"),
    "--patience needs a validation loss": ("train", "--patience", "2"),
    "--keep-best needs a validation loss": ("train", "--keep-best", "--save", "DIR/run"),
    "the spec holds out none": ("train", "--validate-every", "2"),
    "the planned model has no adapters": ("train", "--save-adapters", "DIR/adapters"),
    "prompt 0 has 9 tokens, and a planned sequence has 8": (
        "train", "--sample-every", "2", "--sample-prompt", "To train ",
    ),
    "needs an input by which the model knows where a document begins": ("train", "--packing"),
    "its role is unknown": ("train", "--strange"),
    "packing: documents needs an input": ("plan", "--packing"),
    "the plan has no length 5: it has one length": ("plan", "--length", "5"),
    "prompt 0 has 8 tokens": ("generate", "--prompt", "To train"),
    "prompt 1 is empty": ("generate", "--prompt", "To", "--prompt", ""),
    "max_new_tokens is 0": ("generate", "--prompt", "To", "--max-new-tokens", "0"),
    "and with 7 new ones more than the 8": ("generate", "--prompt", "To", "--max-new-tokens", "7"),
}  # fmt: skip
OF_SPEC = {"--packing": INPUTS + "data: {packing: documents}\n", "--strange": INPUTS.replace("labels: ", "mine: ")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", BAD)
def test_it_is_refused_without_a_capture(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "wandb" in words and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    command, *options = BAD[words]
    keys = next((OF_SPEC[option] for option in options if option in OF_SPEC), INPUTS)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC + keys)
    (tmp_path / "text.txt").write_text("To train a model, a text is needed. " * 4)
    data = ["--data", f"{tmp_path}/text.txt", "--steps", "2"] if command == "train" else []
    captures: list[Any] = []
    monkeypatch.setattr(torch.export, "export", lambda *given, **more: captures.append(given))
    more = [option.replace("DIR", str(tmp_path)) for option in options if option not in OF_SPEC]
    given = [command, f"{tmp_path}/model.py:Model", f"{tmp_path}/spec.yaml", *data, *more]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert not captures
