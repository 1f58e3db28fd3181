"""``import meshwright``: the public names, looked up when they are read, and the command on systems without POSIX."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from tests.tools.limits import HANG_SECONDS

ROOT = Path(meshwright.__file__).parents[1]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.check
@pytest.mark.parametrize("name", meshwright.__all__)
def test_each_public_name_is_what_its_home_defines(name):
    value = getattr(meshwright, name)
    assert value.__name__ == name
    assert value.__module__.split(".")[0] in ("planner", "passes", "runtime")


def test_type_checkers_read_the_same_names():
    stub = ast.parse(Path(meshwright.__file__).with_name("__init__.pyi").read_text())
    imported = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(filter(None, imported)) == sorted(meshwright.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        getattr(meshwright, "plann")  # noqa: B009 - the attribute is looked up at run time


def test_import_loads_no_other_package():
    done = run("import sys; before = set(sys.modules); import meshwright; print(*sorted(set(sys.modules) - before))")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"torch", "planner", "passes", "runtime", "numpy", "pydantic"} == set()


def test_version_is_the_one_that_the_command_prints():
    done = run("from meshwright.__main__ import main; main()", "--version")
    assert done.stdout == f"meshwright {meshwright.__version__}\n"


HIDDEN = "import sys; sys.modules.update(dict.fromkeys(['fcntl', 'resource', 'multiprocessing.forkserver']));"


@pytest.mark.thorough
def test_plan_needs_no_module_that_only_posix_has(tmp_path):
    output = tmp_path / "plan.json"
    arguments = ["plan", str(ROOT / "examples/gpt.py:build"), str(ROOT / "examples/gpt.yaml"), "--format", "json"]
    done = run(HIDDEN + "from meshwright.__main__ import main; main()", *arguments, "-o", str(output))
    assert done.returncode == 0, done.stderr
    assert output.exists()
