"""A user's own directory named like one of our packages is said, not met as an ImportError about something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent


def run_beside(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("package", ["planner", "passes", "runtime"])
@pytest.mark.parametrize("code", ["from meshwright import plan", "import meshwright.shadow as s; s.refuse_shadows()"])
def test_shadowed_package_is_named(tmp_path, package, code):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    done = run_beside(tmp_path, code)
    assert f"{tmp_path / package} hides meshwright's package '{package}'" in done.stderr
    assert f"fix: rename your directory '{package}'" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("package", ["planner", "passes", "runtime"])
def test_the_command_reports_it_in_one_error(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    done = run_beside(tmp_path, "from meshwright.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ImportError: {tmp_path / package} hides meshwright's package '{package}'")
    assert "Traceback" not in done.stderr


def test_directory_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "runtime").mkdir()
    done = run_beside(tmp_path, "from meshwright.shadow import refuse_shadows; refuse_shadows()")
    assert done.returncode == 0, done.stderr
