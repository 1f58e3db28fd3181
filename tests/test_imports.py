"""Imports point one way, public names are looked up when read, and a directory that hides a package is named."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import meshwright
from tests.tools.commands import python
from tests.tools.paths import ROOT

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
    code = (
        "import sys, planner.commands.cli, planner.mesh, planner.pipeline.schedule\nassert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_is_given_a_plan_loads_no_capture():
    """A third of the time in which it starts."""
    code = "import sys, runtime.training.loop\nassert not {'torch._dynamo', 'planner.captured'} & {*sys.modules}"
    done = python("-c", code)
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
    done = python(
        "-c", "import sys; before = set(sys.modules); import meshwright; print(*sorted(set(sys.modules) - before))"
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & {"torch", "planner", "passes", "runtime", "numpy", "pydantic"} == set()


def test_version_is_the_one_that_the_command_prints():
    done = python("-c", "from meshwright.__main__ import main; main()", "--version")
    assert done.stdout == f"meshwright {meshwright.__version__}\n"


HIDDEN = "import sys; sys.modules.update(dict.fromkeys(['fcntl', 'resource', 'multiprocessing.forkserver']));"


@pytest.mark.thorough
def test_plan_needs_no_module_that_only_posix_has(tmp_path):
    output = tmp_path / "plan.json"
    arguments = ["plan", str(ROOT / "examples/gpt.py:build"), str(ROOT / "examples/gpt.yaml"), "--format", "json"]
    done = python("-c", HIDDEN + "from meshwright.__main__ import main; main()", *arguments, "-o", str(output))
    assert done.returncode == 0, done.stderr
    assert output.exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("package", ["planner", "passes", "runtime"])
@pytest.mark.parametrize("code", ["from meshwright import plan", "import meshwright.shadow as s; s.refuse_shadows()"])
def test_shadowed_package_is_named(tmp_path, package, code):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    done = python("-c", code, cwd=tmp_path)
    assert f"{tmp_path / package} hides meshwright's package '{package}'" in done.stderr
    assert f"fix: rename your directory '{package}'" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("package", ["planner", "passes", "runtime"])
def test_the_command_reports_it_in_one_error(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    done = python("-c", "from meshwright.__main__ import main; main()", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ImportError: {tmp_path / package} hides meshwright's package '{package}'")
    assert "Traceback" not in done.stderr


def test_directory_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "runtime").mkdir()
    done = python("-c", "from meshwright.shadow import refuse_shadows; refuse_shadows()", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
