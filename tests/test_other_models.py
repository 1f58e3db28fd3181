"""The catalogue of other people's models is well formed without their packages, and our own models go through."""

import ast
from pathlib import Path

import pytest
import yaml

from benchmarks.other_models import catalogue
from benchmarks.other_models.catalogue import CATALOGUE, Listed, find
from benchmarks.other_models.processes import rows_of
from benchmarks.other_models.table import markdown
from planner.spec.spec import Spec
from tests.tools.limits import HANG_SECONDS

FOLDER = Path(catalogue.__file__).parent


def functions_of(file: str) -> set[str]:
    """Names of the builders in ``file``, read and not imported: its package need not be installed."""
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return assigned | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_model_is_listed_once_with_a_function_that_builds_it():
    builds = [listed.build for listed in CATALOGUE]
    assert len(builds) == len(set(builds)) >= 40
    assert len({(listed.name, listed.source) for listed in CATALOGUE}) == len(CATALOGUE)
    missing = [b for b in builds if b.split(":")[1] not in functions_of(b.split(":")[0])]
    assert missing == []


def test_every_layout_reads_as_a_spec_and_divides_its_batch():
    for listed in CATALOGUE:
        spec = Spec.load(listed.spec())
        axes = {axis: getattr(spec.mesh, axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
        assert listed.layout.removesuffix(" sp") == " ".join(f"{a}{n}" for a, n in axes.items() if n > 1), listed.name
        assert spec.tensor_parallel.sequence_parallel == listed.layout.endswith(" sp"), listed.name
        assert spec.batch.global_size % (spec.batch.micro * spec.mesh.dp) == 0, listed.name
        assert spec.batch.global_size // (spec.batch.micro * spec.mesh.dp) >= spec.mesh.pp, listed.name


def test_what_is_written_anew_names_its_paper_and_what_is_installed_does_not():
    assert [listed.name for listed in CATALOGUE if (listed.source == "own") != bool(listed.paper)] == []


def test_a_package_that_is_not_there_gets_a_row_that_says_so():
    absent = Listed("of nobody", "no-such-package-here", "from_nobody:model", "tp2", catalogue.TEXT)
    assert list(rows_of([absent])) == [(absent, {"result": "not installed"})]


def test_the_page_shows_differences_and_the_line_of_a_refusal():
    equal = {"result": "EQUAL", "flops": 0.98765, "collectives": "6", "differences": {"loss": 1e-16, "gradient": 2e-15}}
    seen = {
        "own_vision:dit": equal,
        "own_vision:mae": {"result": "refused", "detail": "no such thing\n  at:  model.py:3, `a | b`\n  fix: leave it"},
    }
    page = markdown(seen)
    assert "| own, after 2212.09748 | tp2 · pp2 | 98.8% | 6 | EQUAL (loss 1.0e-16, gradient 2.0e-15) |" in page
    assert "refused: no such thing at: model.py:3, `a \\| b` |" in page
    assert f"{len(CATALOGUE)} models: {len(CATALOGUE) - 2} not run, 1 EQUAL, 1 refused." in page


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "mesh"),
    [
        ("own_vision:mixer", {"tp": 2}),
        ("own_decoders:gpt_tied", {"tp": 2}),
        ("own_recent:repeated_experts", {"dp": 2, "ep": 2}),
    ],
)
def test_an_own_model_equals_one_process(build: str, mesh: dict[str, int], tmp_path: Path):
    from runtime.verify.run import verify

    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(find(build).spec() | {"mesh": mesh}))
    report = verify(find(build).reference, str(spec), timeout_seconds=HANG_SECONDS)
    assert report.passed, str(report)
