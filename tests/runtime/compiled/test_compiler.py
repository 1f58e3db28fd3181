"""Without a compiler a run of `compile: true` ends with one error that names the package, before anything runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from planner import PlanError, plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.compiled import requirements as compiler
from runtime.distributed.groups import Groups
from tests.planner.compiled.test_pieces import SPEC, Net

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_machine_without_a_cpp_compiler_is_told_which_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError, match=r"no C\+\+ compiler.*\n.*compile\n.*install the package g\+\+"):
        compiler.check_compiler(True, CPU)
    compiler.check_compiler(False, CPU)


def test_a_cuda_device_needs_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install triton"):
        compiler.check_compiler(True, CUDA)


def test_an_engine_ends_before_it_runs(monkeypatch: pytest.MonkeyPatch):
    decided = plan(Net(torch.nn.functional.gelu), SPEC)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError, match="install the package g"):
        Engine(decided)


def test_a_command_names_the_line_of_the_spec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError) as raised:
        compiler.check_machine(Spec.load(SPEC))
    assert str(raised.value.where) == "compile"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("device", "cluster", "has_triton", "line"),
    [
        (CPU, "h200", True, ""),
        (CUDA, "h200", True, "on"),
        (CUDA, "h200", False, "compile: auto is off: rank 0 has no triton; compile: false silences this"),
        (CUDA, None, True, "compile: auto is off: the spec names no cluster of GPUs; compile: false silences this"),
    ],
    ids=str,
)
def test_auto_is_never_an_error_and_says_on_gpus_why_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: torch.device,
    cluster: str | None,
    has_triton: bool,
    line: str,
):
    monkeypatch.setattr(compiler, "find_spec", lambda name: name if has_triton else None)
    monkeypatch.setenv("PATH", "/nonexistent")
    decided = plan(Net(torch.nn.functional.gelu), {**SPEC, "compile": "auto", "cluster": cluster})
    groups = Groups(decided.mesh, 0, device, timedelta(minutes=5))
    assert compiler.compiles(decided, "auto", groups) == (line == "on")
    assert capsys.readouterr().err.strip() == ("" if line == "on" else line)


def test_a_plan_for_gpus_runs_op_by_op_on_a_cpu():
    spec = {**SPEC, "compile": "auto"}
    batch = {"x": torch.ones(2, 4, 16), "y": torch.zeros(2, 4, 16)}
    losses = []
    for cluster in ("h200", None):
        torch.manual_seed(0)
        with Engine(plan(Net(torch.nn.functional.gelu), {**spec, "cluster": cluster})) as engine:
            assert engine.compiled is None
            losses.append([engine.train_step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]
