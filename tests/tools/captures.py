"""Captures of test models, each made once: in this process, and on disk beside what pytest keeps between runs.

    plan_again(model, spec)          plan(model, spec), where the capture is not what is tested
    captured_again(model, spec)      the same for several plans
    program_again(model, inputs)     a captured program

A capture is found by everything that it depends on: what a forward may read of the model (``digest_of``), inputs,
loss and dtype, the sources of planner/, of the test models and of the model's own classes, and what is installed. A
model that holds something without a certain form (a closure, a class of a function) is captured each time.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.program.program import Program, copied
from planner import Captured, Plan, capture, plan
from planner.capture.export import capture as export
from planner.captured import dtype_of, inputs_of
from planner.saved_plan.plan_file import our_sources
from planner.search.winner import spec_to_capture
from planner.spec.spec import Spec
from tests.tools import kept_programs
from tests.tools.model_digest import Uncertain, digest_of
from tests.tools.paths import ROOT

PLACE = ROOT / ".pytest_cache" / "meshwright"
_made: dict[str, dict[int, Program]] = {}  # by key, and by how many microbatches the batch is as large as


class _Again(Captured):
    """Keeps what is captured at other batch sizes too: a fork that plans has no other way to hand it on."""

    key: str = ""

    def program(self, times: int = 1) -> Program:
        if times in self._programs:
            return super().program(times)
        key = f"{self.key}-{times}"
        found = _read(self.model, key)
        if found is None:
            super().program(times)
            found = _kept(self.model, key, self._programs[times])
        self._programs[times] = found
        return super().program(times)


def plan_again(model: nn.Module, spec: Mapping[str, Any]) -> Plan:
    """``plan(model, spec)``, without a capture where one of the same was made before."""
    return plan(captured_again(model, spec), spec)


def captured_again(model: nn.Module, spec: Spec | Mapping[str, Any]) -> Captured:
    """``capture(model, spec)``, or what that gave before for a model that was built alike."""
    seen = spec_to_capture(Spec.load(spec), None)
    inputs, loss, dtype = inputs_of(seen, None), seen.loss, dtype_of(seen)
    key = _key(model, inputs, loss, dtype)
    if key is None:
        return capture(model, spec)
    key += hashlib.sha256(repr(seen.forms).encode()).hexdigest()[:8] if seen.forms else ""
    if key not in _made:
        _made[key] = {1: _read(model, key) or _kept(model, key, capture(model, spec).program())}
    captured = _Again(model, loss, dtype, 0.0, inputs, _made[key], forms=seen.forms)
    captured.key = key
    return captured


def program_again(model: nn.Module, inputs: Mapping[str, Tensor]) -> Program:
    """``capture(model, inputs)``, or what that gave before for a model that was built alike: a program of its own."""
    key = _key(model, inputs, "auto", None)
    if key is None:
        return export(model, inputs)
    if key not in _made:
        _made[key] = {1: _read(model, key) or _kept(model, key, export(model, inputs))}
    program = copied(_made[key][1])
    program.graph = fx.GraphModule({}, program.graph.graph)  # with code: tests run it
    return program


def _key(model: nn.Module, inputs: Mapping[str, Tensor], loss: str, dtype: torch.dtype | None) -> str | None:
    shapes = [[name, list(x.shape), list(x.stride()), str(x.dtype)] for name, x in inputs.items()]
    settings = str(torch.get_default_dtype()), torch.is_grad_enabled()
    try:
        facts = [digest_of(model), shapes, loss, str(dtype), settings, *_facts(), *map(_content, _files(model))]
    except Uncertain:
        return None
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@cache
def _facts() -> list[Any]:
    models = sorted([*(ROOT / "tests" / "models").glob("*.py"), *(ROOT / "examples").glob("*.py")])
    versions = [sys.version, torch.__version__, torch.version.git_version]
    installed = sorted(f"{found.name} {found.version}" for found in distributions())
    return [our_sources(), installed, versions, *map(_content, map(str, models))]


def _files(model: nn.Module) -> list[str]:
    """Where its classes are written, but for installed packages."""
    modules = {type(module).__module__ for module in model.modules()}
    files = {getattr(sys.modules.get(name), "__file__", None) or "" for name in modules}
    return sorted(file for file in files if file.startswith(f"{ROOT}/") and "/site-packages/" not in file)


@cache
def _content(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _file(model: nn.Module, key: str) -> Path:
    """A directory for each file of models, as the oldest captures of one make room for new ones."""
    return PLACE / type(model).__module__.rpartition(".")[2] / f"{key}.pt"


def _read(model: nn.Module, key: str) -> Program | None:
    return kept_programs.read(_file(model, key))


def _kept(model: nn.Module, key: str, program: Program) -> Program:
    """As it is read again, where it can be kept."""
    with suppress(OSError, Uncertain):
        program, kept = kept_programs.settled(program)
        kept_programs.write(_file(model, key), kept)
    return program
