"""A directory is replaced whole: with and without the system's exchange of names, after errors and after kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.checkpoint import atomic_directory
from runtime.checkpoint.atomic_directory import replaced_directory
from tests.tools.paths import ROOT

WRITE_FOREVER = """
import itertools, sys
from pathlib import Path
from runtime.checkpoint.atomic_directory import replaced_directory
for turn in itertools.count():
    with replaced_directory(Path(sys.argv[1]), lambda name: False) as new:
        (new / "first").write_text(str(turn))
        (new / "second").write_text(str(turn))
"""


def replace(directory: Path, *names: str, stale: str = "") -> None:
    with replaced_directory(directory, lambda name: name == stale) as new:
        for name in names:
            (new / name).write_text("new")


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.fixture(params=["exchange", "two renames"])
def target(request, tmp_path, monkeypatch):
    """A directory with two old files; on systems that can swap names, and on those that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic_directory.sys, "platform", "other")
    (tmp_path / "it").mkdir()
    for name in ("a", "b"):
        (tmp_path / "it" / name).write_text("old")
    return tmp_path / "it"


def test_written_files_replace_old_ones_and_others_stay(target):
    replace(target, "a", "c")
    assert contents(target) == {"a": "new", "b": "old", "c": "new"}
    assert [path.name for path in target.parent.iterdir()] == ["it"]


def test_stale_files_go(target):
    replace(target, "a", stale="b")
    assert contents(target) == {"a": "new"}


def test_an_error_inside_changes_nothing(target):
    (target.parent / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        replace(target, "a", "../file/b")
    (target.parent / "file").unlink()
    assert contents(target) == {"a": "old", "b": "old"}
    assert [path.name for path in target.parent.iterdir()] == ["it"]


def test_a_new_directory_is_made_with_its_parents(tmp_path):
    replace(tmp_path / "x" / "y", "a")
    assert contents(tmp_path / "x" / "y") == {"a": "new"}
    assert (tmp_path / "x" / "y").stat().st_mode & 0o777 == (tmp_path / "x").stat().st_mode & 0o777


def test_a_link_to_a_directory_stays_a_link(target):
    link = target.parent / "link"
    link.symlink_to(target)
    replace(link, "a")
    assert link.is_symlink()
    assert contents(target)["a"] == "new"


def test_what_a_killed_attempt_left_is_removed_by_the_next(target):
    (target.parent / ".it.xyz.partial").mkdir()
    replace(target, "a")
    assert [path.name for path in target.parent.iterdir()] == ["it"]


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        replace(tmp_path / "file", "a")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the system's exchange of names")
def test_a_killed_writer_leaves_one_whole_directory(tmp_path):
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    target = tmp_path / "it"
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(target)], env=environment)
        deadline = time.monotonic() + 60
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3 + random.random() / 5)
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
        assert contents(target).keys() == {"first", "second"}
        assert len(set(contents(target).values())) == 1
