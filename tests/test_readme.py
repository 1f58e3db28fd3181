"""What the README shows runs: its Python, its spec, and every name of the engine that it mentions."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.spec.spec import Spec

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
LENGTH, VOCABULARY, SIZE = 8, 37, 16


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def small(text: str) -> str:
    """The README's spec on one rank, for a small model."""
    text, num_meshes = re.subn(r"mesh: \{.*\}", "mesh: {}", text)
    text, num_inputs = re.subn(r"shape: \[1024\](.*)high: 50257", rf"shape: [{LENGTH}]\1high: {VOCABULARY}", text)
    assert (num_meshes, num_inputs) == (1, 1)
    return text


@pytest.fixture(scope="module")
def namespace(tmp_path_factory) -> dict[str, Any]:
    """Run every Python block of the README in turn, in a directory with its spec; the names that they leave."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("readme")
    (directory / "spec.yaml").write_text(small(blocks("yaml")[0]))
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(directory / "some-directory")
    names: dict[str, Any] = {"model": model}
    names["batch"] = {name: torch.randint(VOCABULARY, (SIZE, LENGTH)) for name in ("input_ids", "labels")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for text in blocks("python"):
            exec(text, names)
    names["directory"] = directory
    yield names
    names["engine"].close()


def test_the_spec_is_valid_as_it_stands(tmp_path):
    (tmp_path / "spec.yaml").write_text(blocks("yaml")[0])
    assert Spec.load(tmp_path / "spec.yaml").mesh.dp == 2


def test_the_python_runs_and_trains_the_model(namespace):
    assert namespace["report"].loss > 0
    assert namespace["report"].grad_norm > 0
    assert (namespace["directory"] / "new-directory" / "model.safetensors").is_file()


def test_every_attribute_of_the_engine_that_is_named_exists(namespace):
    named = sorted(set(re.findall(r"\bengine((?:\.[a-z_]+)+)", README)))
    assert ".mesh.dp_rank" in named
    for path in named:
        reduce(getattr, path.strip(".").split("."), namespace["engine"])
