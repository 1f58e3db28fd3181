"""What a run is to write is tried before it starts: one error that names the place, and nothing is left behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from passes.errors import PlanError
from runtime.training.job import Job
from runtime.training.run import check_outputs


def job(**outputs: Any) -> Job:
    return Job("m:build", "spec.yaml", "stdlib", 3, **{name: str(path) for name, path in outputs.items()})


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "loss.png").write_text("old")
    (tmp_path / "log.jsonl").write_text("of ranks that are started again")
    check_outputs(job(plot=tmp_path / "loss.png", tensorboard=tmp_path / "a" / "b", log=tmp_path / "log.jsonl"))
    assert (tmp_path / "loss.png").read_text() == "old"
    assert (tmp_path / "log.jsonl").read_text() == "of ranks that are started again"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "log.jsonl", "loss.png"]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"log": "none/log.jsonl"}, "cannot write the log: No such file or directory"),
        ({"log": "file/log.jsonl"}, "cannot write the log: Not a directory"),
        ({"plot": "none/loss.png"}, "cannot write the picture: No such file or directory"),
        ({"plot": "directory.png"}, "cannot write the picture: Is a directory"),
        ({"plot": "loss.txt"}, "loss.txt is not a supported image format"),
        ({"profile": "1", "profile_to": "none/trace.json"}, "cannot write the trace: No such file or directory"),
        ({"profile": "3"}, "ends at step 4, but the run has 3 steps"),
        ({"profile_to": "trace.json"}, "no step is profiled"),
        ({"tensorboard": "file"}, "cannot write the directory .*: File exists\n  at:  --tensorboard"),
        ({"tensorboard": "file/board"}, "cannot write the directory .*: Not a directory\n  at:  --tensorboard"),
    ],
)
def test_what_cannot_be_written_is_one_error(tmp_path: Path, outputs: dict[str, str], words: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory.png").mkdir()
    given = {name: path if name == "profile" else tmp_path / path for name, path in outputs.items()}
    with pytest.raises(PlanError, match=words):
        check_outputs(job(**given))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory.png", "file"]


@pytest.mark.parametrize(("option", "package"), [("plot", "matplotlib"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, option, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    with pytest.raises(PlanError, match=f"--{option} needs the package {package}") as caught:
        check_outputs(job(**{option: tmp_path / "x.png"}))
    assert f"meshwright[{option}]" in str(caught.value)


def test_the_command_ends_with_2_before_anything_starts(tmp_path):
    from runtime.cli import app

    given = ["train", "examples/gpt.py:build", "examples/gpt.yaml", "--data", "stdlib"]
    result = CliRunner().invoke(app, [*given, "--plot", str(tmp_path / "none" / "loss.png")])
    assert result.exit_code == 2
    assert "cannot write the picture" in result.output
    assert "Traceback" not in result.output
