"""A backend that cannot run is refused before any rank starts: where in the spec, and what runs instead."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from passes.errors import SpecError
from planner import PlanError
from planner.spec.spec import Spec
from runtime.cli import app
from runtime.compiled.requirements import EXTRA, check_backend, check_machine
from tests.tools.paths import ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NO_PACKAGE = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="transformer_engine is installed")


@pytest.mark.parametrize("impl", ["none", "emulate"])
def test_emulation_runs_on_any_device(impl):
    assert check_backend(impl, CPU) is check_backend(impl, CUDA) is None


def test_local_graphs_without_cuda_are_refused_and_emulation_is_named():
    assert check_backend("local", CUDA) is None
    with pytest.raises(PlanError, match="impl = local captures on CUDA devices, and this process runs on cpu") as error:
        check_backend("local", CPU)
    assert error.value.where == "cuda_graphs.impl"
    assert "impl: emulate" in error.value.fix


@NO_PACKAGE
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_missing_package_is_named_with_its_extra(device):
    with pytest.raises(PlanError, match="transformer_engine is not installed") as error:
        check_backend("transformer_engine", device)
    assert f"pip install '{EXTRA}'" in error.value.fix


def test_the_extra_is_one_of_the_project_and_holds_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extra = EXTRA.rstrip("]").partition("[")
    assert name == project["name"]
    assert any(entry.startswith("transformer-engine") for entry in project["optional-dependencies"][extra])


@NO_GPU
def test_on_this_machine_the_error_names_the_line_of_the_spec(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("mesh: {}\nbatch: {global: 2, micro: 1}\ncuda_graphs: {impl: local}\n")
    with pytest.raises(SpecError, match=r"local captures on CUDA devices") as error:
        check_machine(Spec.load(path))
    assert "spec.yaml:3" in str(error.value)


@pytest.mark.sampled(1)
@NO_GPU
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("command", [["verify"], ["train", "--data", "stdlib"]])
def test_commands_that_run_end_before_any_rank_starts_and_plan_plans(impl, command, tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text((ROOT / "examples" / "gpt.yaml").read_text() + f"\ncuda_graphs: {{impl: {impl}}}\n")
    model = f"{ROOT / 'examples' / 'gpt.py'}:build"
    result = CliRunner().invoke(app, [command[0], model, str(path), *command[1:]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert "spec.yaml:" in result.stderr
    assert "impl: emulate" in result.stderr
    planned = CliRunner().invoke(app, ["plan", model, str(path)])
    assert (planned.exit_code, "Graph regions" in planned.stdout) == (0, True)
