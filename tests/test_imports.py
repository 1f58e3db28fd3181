"""Imports point one way, and the planner touches neither process groups nor devices."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tools.limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM = {"passes": {"planner", "runtime"}, "planner": {"runtime"}}
NO_TORCH = (
    *("mesh", "ranks", "sharding/buckets"),
    *(f"pipeline/{name}" for name in ("kinds", "schedule", "simulate", "message_slots")),
)


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def attributes(path: Path) -> set[str]:
    """Every dotted access such as ``torch.cuda``."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("package", UPSTREAM)
def test_imports_point_upstream(package):
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported(path)}
        assert not roots & UPSTREAM[package], path.name


@pytest.mark.thorough
@pytest.mark.parametrize("banned", ["torch.distributed", "torch.cuda"])
def test_planner_and_the_program_never_use(banned):
    rooms = ("planner", *(f"passes/{room}" for room in ("program", "types", "rules", "canonical", "moe")))
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        used = imported(path) | attributes(path)
        assert not {name for name in used if name == banned or name.startswith(banned + ".")}, path.name


@pytest.mark.parametrize("name", NO_TORCH)
def test_arithmetic_of_ranks_and_orders_needs_no_torch(name):
    roots = {imported_name.partition(".")[0] for imported_name in imported(ROOT / "planner" / f"{name}.py")}
    assert not roots & {"torch", "transformers"}


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_groups_and_schedules_load_no_torch():
    code = "import sys, planner.cli, planner.mesh, planner.pipeline.schedule\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_is_given_a_plan_loads_no_capture():
    """A third of the time in which it starts."""
    code = "import sys, runtime.training.loop\nassert not {'torch._dynamo', 'planner.captured'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr


MODULES = {"pyyaml": "yaml"}  # where the name of the package is not that of its module


@pytest.mark.thorough
def test_every_dependency_is_imported_by_something():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=\[ ]", entry)[0] for entry in listed}
    roots = {
        name.partition(".")[0]
        for package in (*UPSTREAM, "runtime")
        for path in (ROOT / package).rglob("*.py")
        for name in imported(path)
    }
    assert {name for name in names if MODULES.get(name, name) not in roots} == set()
