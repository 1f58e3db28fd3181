"""A directory is replaced whole, or file by file where it must stay itself; after errors, crashes and kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from passes.errors import PlanError
from runtime.checkpoint import atomic_directory
from runtime.checkpoint.atomic_directory import is_mount_point, replaced_directory
from runtime.checkpoint.pretrained_load import read_whole
from runtime.checkpoint.pretrained_save import is_weights
from runtime.checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsFiles
from tests.tools.limits import HANG_SECONDS
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


@pytest.fixture(params=["exchange", "file by file", "working directory"])
def target(request, tmp_path, monkeypatch):
    """A directory with two old files; on systems that can swap names, and on those that cannot."""
    if request.param == "file by file":
        monkeypatch.setattr(atomic_directory.sys, "platform", "other")
    (tmp_path / "it").mkdir()
    if request.param == "working directory":
        monkeypatch.chdir(tmp_path / "it")
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
    with pytest.raises(NotADirectoryError):
        replace(target, "a", "a/b")
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
    place = target if Path.cwd() == target else target.parent
    (place / ".it.xyz.partial").mkdir()
    replace(target, "a")
    assert contents(target) == {"a": "new", "b": "old"}
    assert [path.name for path in target.parent.iterdir()] == ["it"]


def test_the_second_of_two_writers_is_told_so_and_changes_nothing(target):
    with replaced_directory(target, lambda name: False) as new:
        (new / "a").write_text("first")
        with pytest.raises(PlanError, match="another process is writing to this directory"):
            replace(target, "a")
        assert (new / "a").read_text() == "first"
    assert contents(target) == {"a": "first", "b": "old"}
    replace(target, "b")
    assert contents(target) == {"a": "first", "b": "new"}


def test_the_working_directory_stays_the_same_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.stat(".").st_ino
    replace(Path("."), "a")
    assert os.stat(".").st_ino == before
    assert Path("a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_mount_points_are_known():
    assert is_mount_point(Path("/proc"))
    assert not is_mount_point(ROOT / "tests")


MOUNTED = """
mount -t tmpfs none "$1" && mkdir -p "$1/x" && mount --bind "$1/x" "$2" && echo old > "$2/a" && echo old > "$2/b" &&
"$3" -c 'import sys; from pathlib import Path; from tests.runtime.checkpoint.test_atomic_directory import replace
replace(Path(sys.argv[1]), "a", "c", stale="b")' "$2" && cd "$2" && ls -A && cat a
"""


@pytest.mark.thorough
def test_a_mount_point_is_written_file_by_file(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "bound").mkdir()
    arguments = ["sh", "-c", MOUNTED, "sh", str(tmp_path / "disk"), str(tmp_path / "bound"), sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        may = subprocess.run(["unshare", "-rm", "true"], capture_output=True, timeout=HANG_SECONDS).returncode == 0
    except FileNotFoundError:
        may = False
    if not may:
        pytest.skip("needs a mount namespace of its own")
    done = subprocess.run(
        ["unshare", "-rm", *arguments], capture_output=True, text=True, timeout=HANG_SECONDS, cwd=ROOT, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "a\nc\nnew"), done.stderr


SETS = {"one": [SINGLE], "two": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]}
SETS["three"] = [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX]


def save_set(directory: Path, kind: str, value: float) -> None:
    with replaced_directory(directory, is_weights, (SINGLE, INDEX).__contains__) as new:
        files = [name for name in SETS[kind] if name != INDEX]
        held = {file: [name for i, name in enumerate("uvwxyz") if i % len(files) == n] for n, file in enumerate(files)}
        for file, names in held.items():
            save_file({name: torch.full((2,), value) for name in names}, new / file)
        if INDEX in SETS[kind]:
            places = {name: file for file, names in held.items() for name in names}
            (new / INDEX).write_text(json.dumps({"weight_map": places}))


def loaded(directory: Path) -> set[float] | None:
    """The values that a reader would get; None where it is refused."""
    try:
        with SafetensorsFiles(directory) as files:
            target = torch.zeros(len(files.tensors), 2)
            for row, name in zip(target, files.tensors, strict=True):
                read_whole(files, files.source(name), row)
            return set(target.flatten().tolist())
    except PlanError:
        return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("new", SETS)
@pytest.mark.parametrize("old", SETS)
def test_a_crash_between_two_files_leaves_the_old_the_new_or_nothing_that_loads(tmp_path, monkeypatch, old, new):
    monkeypatch.chdir(tmp_path)  # so that files are moved one by one
    calls, limit = 0, 0

    def crashing(call):
        def run(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > limit:
                raise KeyboardInterrupt
            return call(*arguments, **options)

        return run

    outcomes = []
    for number in range(20):
        limit = number
        save_set(tmp_path, old, 1.0)
        calls = 0
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(atomic_directory.os, "replace", crashing(os.replace))
            patch.setattr(atomic_directory.Path, "unlink", crashing(Path.unlink))
            save_set(tmp_path, new, 2.0)
        outcomes.append(loaded(tmp_path))
        assert outcomes[-1] in (None, {1.0}, {2.0})
    assert (outcomes[0], outcomes[-1]) == ({1.0}, {2.0})
    assert None not in outcomes or (old == new and old != "one")


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        replace(tmp_path / "file", "a")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the system's exchange of names")
def test_a_killed_writer_leaves_one_whole_directory(tmp_path):
    root = ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}
    target = tmp_path / "it"
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(target)], env=environment)
        deadline = time.monotonic() + HANG_SECONDS
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3 + random.random() / 5)
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=HANG_SECONDS)
        assert contents(target).keys() == {"first", "second"}
        assert len(set(contents(target).values())) == 1
