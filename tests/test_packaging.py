"""The wheel and the source archive hold all that a user needs; an editor finds our types; a shell completes."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

PACKAGES = ("meshwright", "planner", "passes", "runtime", "specs")

TWO_RANKS = """
mesh: {dp: 2}
batch: {global: 4, micro: 2}
inputs: {input_ids: {shape: [32], dtype: int64, high: 256}, targets: {like: input_ids}}
"""
USE = """
from planner import Plan, plan
from runtime import Engine, StepReport
from torch import nn

decided: Plan = plan(nn.Linear(2, 2), "spec.yaml")
with Engine(decided) as engine:
    report: StepReport = engine.train_step({})
    loss: float = report.loss
    wrong: str = report.loss
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=HANG_SECONDS, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and a source archive of the tracked files, built without a network."""
    root = tmp_path_factory.mktemp("built")
    source, out = root / "source", root / "out"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out.mkdir()
    hooks = "from setuptools import build_meta as b; print(b.build_wheel({out!r})); print(b.build_sdist({out!r}))"
    run(sys.executable, "-c", hooks.format(out=str(out)), cwd=source)
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "archive": archive}


def wanted() -> set[str]:
    """Every tracked file of the packages but tests: code, specs, templates, marks of types."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


@pytest.mark.thorough
@pytest.mark.slow
def test_wheel_and_archive_hold_every_file_of_the_packages(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert wanted() - set(wheel.namelist()) == set()
    with tarfile.open(built["archive"]) as archive:
        assert wanted() - {name.partition("/")[2] for name in archive.getnames()} == set()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_wheel_runs_in_a_clean_environment(built: dict[str, Path], tmp_path: Path) -> None:
    """Its own environment, which sees this one's libraries, but not this checkout."""
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(site)
    libraries = sysconfig.get_path("purelib")
    (site / "libraries.pth").write_text(f"import sys; sys.path.append({libraries!r})\n")  # without its .pth files
    code = "import planner, runtime; print(planner.__file__); from runtime.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    (tmp_path / "model.py").write_text((ROOT / "examples" / "gpt.py").read_text())
    (tmp_path / "spec.yaml").write_text((ROOT / "examples" / "gpt.yaml").read_text())
    told = run(
        python, "-c", code, "plan", "model.py:build", "spec.yaml", "--format", "json", cwd=tmp_path, env=environment
    )
    assert told.startswith(str(site))
    assert '"version"' in told
    door = "import sys, meshwright; print(meshwright.__file__, 'torch' in sys.modules)"
    assert run(python, "-c", door, cwd=tmp_path, env=environment).split() == [f"{site}/meshwright/__init__.py", "False"]
    (tmp_path / "spec.yaml").write_text(TWO_RANKS)
    (tmp_path / "text.txt").write_text("all that is said here is said once more. " * 100)
    words = "train", "model.py:build", "spec.yaml", "--data", "text.txt", "--steps", "1", "--log", "log.jsonl"
    run(python, "-m", "meshwright", *words, cwd=tmp_path, env=environment)
    assert '"step": 1,' in (tmp_path / "log.jsonl").read_text()


@pytest.mark.thorough
@pytest.mark.slow
def test_an_editor_of_a_user_knows_our_types(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    settings = f'[tool.basedpyright]\nextraPaths = ["{ROOT}"]\ntypeCheckingMode = "standard"\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    checker = Path(sys.executable).parent / "basedpyright"
    done = subprocess.run(
        [checker, "--pythonpath", sys.executable, "use.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout
    assert "use.py:10" in errors[0]


def test_every_package_says_that_it_has_types():
    assert all((ROOT / name / "py.typed").is_file() for name in ("planner", "passes", "runtime"))


@pytest.mark.parametrize(("words", "expected"), [("meshwright pl", "plan"), ("meshwright plan --form", "--format")])
def test_a_shell_completes_commands_and_options(words: str, expected: str) -> None:
    asked = {"_MESHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    told = run(sys.executable, "-m", "runtime.cli", cwd=ROOT, env={**os.environ, **asked})
    assert expected in told.split()


def test_the_module_is_the_command() -> None:
    assert "Usage: meshwright" in run(sys.executable, "-m", "runtime", "--help", cwd=ROOT)
