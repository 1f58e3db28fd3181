"""Without a compiler a run of `compile: true` ends with one error that names the package, before anything runs."""

from __future__ import annotations

import pytest
import torch

from planner import PlanError, plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.compiled import compiler
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
        compiler.check_compiler_here(Spec.load(SPEC))
    assert str(raised.value.where) == "compile"
