"""The commands that train one process beside the ranks, on directories with quantised weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from runtime.checkpoint.safetensors_files import SINGLE
from runtime.cli import app
from runtime.verify.reference import fill_from_files

pytest.importorskip("transformers")

from planner.capture.model.reference import load_model
from tests.models.hugging_face import LENGTH, ZOO, made
from tests.runtime.checkpoint.test_quantised_weights import BLOCK, FP8, in_mxfp4, quantised, settings_of, write
from tests.tools.hub_directories import saved

VOCABULARY = 257
ROWS = settings_of(strategy="channel")


def llama_in_fp8(directory: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """A small model of which no block divides a matrix; returns the quantised weights in bfloat16."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": BLOCK + 8, "num_hidden_layers": 1}
    made(replace(ZOO["llama"], sizes=ZOO["llama"].sizes | sizes)).save_pretrained(directory)
    held, values = load_file(directory / SINGLE), {}
    config = json.loads((directory / "config.json").read_text())
    kind, suffix = ("block", "_scale_inv") if settings is FP8 else ("row", "_scale")
    for name in [name for name in held if name.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        held[name], held[f"{name}{suffix}"], values[name] = quantised((rows, columns), kind)
    write(directory, held, settings)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return values


def spec_in(directory: Path, high: int, **mesh: int) -> str:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": high}
    content = {"mesh": mesh, "batch": {"global": 2, "micro": 2}, "inputs": {"input_ids": ids, "labels": ids}}
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("settings", [FP8, ROWS], ids=["blocks", "rows"])
def test_the_one_process_has_the_values_of_the_format(settings, tmp_path):
    """transformers takes 68 rows for a block of 128 if a matrix has 136."""
    wanted = llama_in_fp8(tmp_path, settings)
    found = dict(load_model(f"hf:{tmp_path}", materialize=True, fill=fill_from_files).named_parameters())
    assert not any(parameter.is_meta for parameter in found.values())
    assert len(wanted) == 7
    for name, value in wanted.items():
        assert found[name].detach().bfloat16().equal(value), name


@pytest.mark.thorough
def test_a_run_beside_one_process(tmp_path):
    llama_in_fp8(tmp_path / "in", FP8)
    (tmp_path / "text").write_text("abcdefgh " * 50)
    given = ["--data", str(tmp_path / "text"), "--steps", "2", "--compare"]
    done = CliRunner().invoke(app, ["train", f"hf:{tmp_path / 'in'}", spec_in(tmp_path, VOCABULARY), *given])
    assert done.exit_code == 0, done.output
    assert float(done.stdout.rpartition("over 2 steps: ")[2]) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["blocks, tp 2", "rows", "MXFP4"])
def test_the_ranks_equal_one_process(kind, tmp_path):
    high = VOCABULARY
    if kind == "MXFP4":
        high = saved("gpt_oss", tmp_path / "in").config.vocab_size
        in_mxfp4(tmp_path / "in")
    else:
        llama_in_fp8(tmp_path / "in", ROWS if kind == "rows" else FP8)
    spec = spec_in(tmp_path, high, **({"tp": 2} if "tp" in kind else {}))
    done = CliRunner().invoke(app, ["verify", f"hf:{tmp_path / 'in'}", spec])
    assert done.exit_code == 0, done.output
    assert "EQUAL to one process" in done.stdout
