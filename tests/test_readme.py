"""The README and the pages that continue it run as shown: Python, spec, plan, commands, attributes of the engine."""

import re
from functools import reduce
from typing import Any

import pytest
import torch
from typer.main import get_command

from planner import plan
from planner.capture.model.reference import load_model
from planner.report.section import Section
from planner.report.sections import sections
from planner.spec.spec import Spec
from runtime.cli import app
from tests.tools.paths import ROOT

README = (ROOT / "README.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()  # goes on with the README's names
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
MOST_LINES = 130
LENGTH, VOCABULARY, SIZE = 8, 37, 16


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def small(text: str) -> str:
    """The README's spec on one rank, for a small model."""
    text, num_meshes = re.subn(r"mesh: \{.*\}", "mesh: {}", text)
    text, num_inputs = re.subn(r"shape: \[1024\](.*)high: 50257", rf"shape: [{LENGTH}]\1high: {VOCABULARY}", text)
    assert (num_meshes, num_inputs) == (1, 1)
    return text


@pytest.fixture(scope="module")
def namespace(tmp_path_factory) -> dict[str, Any]:
    """Run every Python block in turn, in a directory with the README's spec; the names that they leave."""
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
        for text in (*blocks("python"), *blocks("python", PYTHON)):
            exec(text, names)
    names["directory"] = directory
    yield names
    names["engine"].close()


def test_a_newcomer_reads_a_short_page():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_index_of_the_documentation_lists_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[([a-z_]+\.md)\]\(\1\)", (ROOT / "docs/README.md").read_text(), re.MULTILINE)) == pages


def test_the_spec_is_valid_as_it_stands(tmp_path):
    (tmp_path / "spec.yaml").write_text(blocks("yaml")[0])
    assert Spec.load(tmp_path / "spec.yaml").mesh.dp == 2


def test_the_python_runs_and_trains_the_model(namespace):
    assert namespace["report"].loss > 0
    assert namespace["report"].grad_norm > 0
    assert (namespace["directory"] / "new-directory" / "model.safetensors").is_file()


def test_every_attribute_of_the_engine_that_is_named_exists(namespace):
    named = sorted(set(re.findall(r"\bengine((?:\.[a-z_]+)+)", README + PYTHON)))
    assert ".mesh.dp_rank" in named
    for path in named:
        reduce(getattr, path.strip(".").split("."), namespace["engine"])


@pytest.fixture(scope="module")
def printed() -> list[Section]:
    pytest.importorskip("transformers")
    command = re.search(r"^`meshwright plan (\S+) (\S+)` prints this", README, re.MULTILINE)
    assert command
    model, spec = command.groups()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return sections(plan(load_model(model), spec))


@pytest.mark.thorough
def test_the_plan_that_is_shown_is_printed(printed):
    """Rows, columns and the ends of cells may be left out there, as ``…``; all else stands in the plan."""
    (sample,) = blocks("text")
    by_title = {section.title: section for section in printed}
    num_rows = 0
    for title, *lines in (part.splitlines() for part in sample.strip().split("\n\n")):
        section = by_title[title]
        if not section.rows:
            assert all(any(shows(line, said) for said in section.note.splitlines()) for line in lines)
            continue
        columns, *rows = (re.split(r"  +", line) for line in lines if line != "…")
        places = [section.columns.index(column) for column in columns]
        assert places == sorted(places)
        for cells in rows:
            assert len(cells) == len(places)
            assert any(all(map(shows, cells, [row[p] for p in places])) for row in section.rows), cells
        num_rows += len(rows)
    assert num_rows > 10


def shows(cell: str, whole: str) -> bool:
    return whole.startswith(cell.removesuffix("…").rstrip()) if cell.endswith("…") else cell == whole


def test_every_command_is_shown_with_options_that_it_has():
    commands: dict[str, Any] = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    shown = re.findall(r"^    meshwright (\w+)(.*)$", COMMANDS, re.MULTILINE)
    assert {name for name, _ in shown} == set(commands)
    for name, rest in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        given = set(re.findall(r"(?<!\S)\[?(--?[a-z][\w-]*)", rest.partition("#")[0]))
        assert given <= known, name
