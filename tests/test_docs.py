"""What the documents say of the code is so: the tree of folders, the recipe, the passes, the layers, and every path."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from passes.lower import PASSES
from tests.tools.paths import ROOT
from tests.tools.tiers import MARKS, TIERS
from tests.tools.words import comments, docstrings

pytestmark = pytest.mark.check

PAGES = ("*.md", "docs/*.md", "docs/guide/*.md", "benchmarks/README.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
INTERNALS = (ROOT / "docs" / "internals.md").read_text()
NAMES = [mark.partition(":")[0].partition("(")[0] for mark in MARKS]
HOUSES = ("planner", "passes", "runtime")
TOPS = ("meshwright", *HOUSES, "specs", "examples", "benchmarks", "tests")
PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join((*TOPS, 'docs'))})/[\w./-]*)(?:::(\w+))?")
MODULE = re.compile(rf"`((?:{'|'.join(HOUSES)})(?:\.\w+)+)`")
IN_PROSE = re.compile(rf"(?<![\w.:])((?:{'|'.join(HOUSES)})(?:\.[a-z_]\w*)+)(?![\w(:])")


def section(title: str) -> str:
    """The text below a heading of internals.md."""
    return re.split(r"^## ", INTERNALS.partition(f"## {title}\n")[2], flags=re.MULTILINE)[0]


def tree() -> Iterator[tuple[Path, str]]:
    """(folder, its line) of the tree in internals.md, where two spaces are a level."""
    parents: list[str] = []
    for line in section("The rooms").split("```")[1].strip("\n").splitlines():
        found = re.fullmatch(r"( *)(\w+)/ +(.+)", line)
        assert found, line
        indent, name, text = found.groups()
        parents = [*parents[: len(indent) // 2], name]
        yield Path(*parents), text


def folders() -> set[Path]:
    """Every folder with Python files of its own, but those of tests that mirror one of a house."""
    found = {path.parent.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")}
    return {folder for folder in found if not mirrored(folder)}


def mirrored(folder: Path) -> Path | None:
    """tests/passes/program → passes/program."""
    first, *rest = folder.parts
    return Path(*rest) if first == "tests" and rest and rest[0] in HOUSES else None


def test_the_tree_has_every_folder_and_no_other():
    listed = [folder for folder, _ in tree()]
    assert len(listed) == len(set(listed))
    assert set(listed) == folders()


def test_the_line_of_a_folder_is_the_docstring_of_its_init():
    lines = {folder: text for folder, text in tree() if (ROOT / folder / "__init__.py").is_file()}
    docstrings = {f: ast.get_docstring(ast.parse((ROOT / f / "__init__.py").read_text())) or "" for f in lines}
    assert lines == {folder: text.partition("\n")[0] for folder, text in docstrings.items()}
    assert set(lines) >= {folder for folder in folders() if folder.parts[0] in HOUSES}


def test_tests_mirror_the_houses():
    held = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    mirrors = {original for folder in held if (original := mirrored(folder))}
    assert {folder for folder in mirrors if not (ROOT / folder / "__init__.py").is_file()} == set()
    assert len(mirrors) > 10


def names_in(path: Path) -> set[str]:
    """What a Python file defines at its top."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_a_document_names_exists(document):
    for path, name in PATH.findall(document.read_text()):
        file = ROOT / path.rstrip(".")
        assert file.exists(), path
        assert not name or name in names_in(file), f"{path}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_dotted_name_that_a_document_names_exists(document):
    for dotted in MODULE.findall(document.read_text()):
        assert resolved(dotted) is not None, dotted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("house", HOUSES)
def test_every_dotted_name_of_a_docstring_or_comment_exists(house):
    for file in sorted((ROOT / house).rglob("*.py")):
        source = file.read_text()
        for line, text in (*docstrings(source), *comments(source)):
            missing = {name for name in IN_PROSE.findall(text) if resolved(name) is None}
            assert missing == set(), f"{file}:{line}"


def resolved(dotted: str) -> Any:
    """A module, or what stands in one."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        parent, _, name = dotted.rpartition(".")
        return getattr(resolved(parent), name, None) if parent else None


def test_the_recipe_has_the_steps_of_plan_in_their_order():
    listed = re.findall(r"^\d+\. `([\w.]+)`", section("The recipe"), re.MULTILINE)
    carried = ("shown_if_slow", "PlanError", "replace", "Cutting", "Beside", "Earlier")
    assert listed == [n for n in steps_of("planner.api", "decide") if n not in carried]


def steps_of(module: str, function: str) -> Iterator[str]:
    """What a function calls of other modules, in the order of the calls; so do the steps of a capture and of a cut."""
    body = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()).body
    homes = {a.name: node.module for node in body if isinstance(node, ast.ImportFrom) for a in node.names}
    methods = (node for of in body if isinstance(of, ast.ClassDef) for node in of.body)
    functions = {node.name: node for node in (*body, *methods) if isinstance(node, ast.FunctionDef)}
    for called in calls_of(function, functions):
        home = homes.get(called.partition(".")[0])
        if home in ("planner.captured", "planner.recipe"):
            yield from steps_of(home, called)
        elif home is not None:
            yield called


def calls_of(name: str, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """What a function calls, in the order of the calls, and what the functions of its file call in their place."""
    body = functions[name].body
    inner = {id(node) for within in body if isinstance(within, ast.FunctionDef) for node in ast.walk(within)}
    calls = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Call) and id(node) not in inner]
    for call in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset)):  # arguments before their reader
        called = ast.unparse(call.func).removeprefix("self.")
        yield from calls_of(called, functions) if called in functions else (called,)


def test_the_gates_are_those_of_the_passes():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section("Gates between passes"), re.MULTILINE)
    facts = {
        step.name: [check.__name__.replace("_", " ") for check in (*step.leaves, *step.leaves_slowly)]
        for step in PASSES
    }
    assert {name: re.findall(r"[a-z][a-z ]+[a-z]", re.sub(r"\(.*?\)", "", text)) for name, text in rows} == facts
    assert [name for name, _ in rows] == [step.name for step in PASSES]


def test_the_layers_are_those_of_the_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [c for c in contracts if c["type"] == "layers"]
    expected = {c.get("containers", ["houses"])[0]: c["layers"] for c in layered}
    drawn: dict[str, str] = {}
    for line in section("Layers").split("```")[1].strip("\n").splitlines():
        name = line[: line.index(" ")] or [*drawn][-1]
        drawn[name] = drawn.get(name, "") + line.removeprefix(name).strip() + " "
    assert {n: [layer.strip("() ") for layer in text.split(">")] for n, text in drawn.items()} == expected


def targets() -> set[str]:
    """What `make` can be asked for."""
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_that_a_document_names_exists(document):
    assert set(re.findall(r"(?:`|^    )make ([a-z]\w*)", document.read_text(), re.MULTILINE)) <= targets()


def test_the_tiers_of_tests_and_their_marks_are_named_and_what_must_pass_is_the_command_of_the_readme():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {f"    make {tier} " for tier in TIERS} <= set(re.findall(r"^    make \w+ ", contributing, re.MULTILINE))
    assert {f"| `{mark}" for mark in NAMES} <= set(re.findall(r"^\| `\w+", contributing, re.MULTILINE))
    assert "    make test " in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").read_text().endswith("exec make test\n")
