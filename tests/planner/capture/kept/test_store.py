"""The directory of kept captures: nobody else writes there, nothing damaged is read, one process captures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from planner.capture.kept import store
from planner.capture.kept.codec import decode
from runtime.cli import app

KEY = "k" * 64


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    found = store.place_of()
    assert found is not None
    store.make(found)
    return found


def kept(place: Path) -> Path:
    store.write(place, KEY, {"nodes": [1, "two"]}, {"c": torch.arange(3)})
    return place / f"{KEY}.capture"


def test_what_was_written_is_read(place: Path):
    kept(place)
    program, constants = store.read(place, KEY) or ({}, {})
    assert program == {"nodes": [1, "two"]}
    assert constants["c"].tolist() == [0, 1, 2]
    assert constants["c"].detach_() is constants["c"]  # as a captured torch.tensor(..) does: a view refuses it
    assert store.read(place, "other") is None
    assert [path.name for path in place.iterdir()] == [f"{KEY}.capture"]


def test_files_and_directories_are_the_owners_alone(place: Path):
    assert kept(place).stat().st_mode & 0o777 == 0o600
    assert place.stat().st_mode & 0o777 == place.parent.stat().st_mode & 0o777 == 0o700


def test_zero_keeps_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(store.VARIABLE, "0")
    assert store.place_of() is None


def test_the_users_cache_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.place_of() == tmp_path / "meshwright" / "captures"


def test_a_link_or_a_directory_that_others_write_to_is_not_used(place: Path, tmp_path: Path):
    place.chmod(0o777)
    with pytest.raises(OSError, match="others can write"):
        store.make(place)
    place.chmod(0o700)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="a link"):
        store.make(place)
    with pytest.raises(OSError, match="a link"):
        store.kept_in(place)


def test_a_directory_of_another_user_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="others can write"):
        store.make(place)


@pytest.mark.parametrize("at", [0, 30, 100, -1])
def test_a_flipped_byte_is_no_capture(place: Path, at: int):
    path = kept(place)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="digest"):
        store.read(place, KEY)


def test_a_link_a_pipe_and_a_file_that_others_write_to_are_not_read(place: Path, tmp_path: Path):
    path = kept(place)
    path.chmod(0o666)
    with pytest.raises(OSError, match="others can write"):
        store.read(place, KEY)
    path.chmod(0o600)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError):  # noqa: PT011  # the words are the system's
        store.read(place, KEY)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="another kind"):
        store.read(place, KEY)


def test_a_link_in_the_place_of_a_lock_is_refused(place: Path, tmp_path: Path):
    (place / f"{KEY}.lock").symlink_to(tmp_path / "anything")
    with pytest.raises(OSError, match="a link"), store.alone(place, KEY):
        pass
    assert not (tmp_path / "anything").exists()


def test_locks_of_two_keys_are_two_and_nobody_waits_for_ever(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_WAIT_SECONDS", 0.0)
    with store.alone(place, KEY), store.alone(place, "other"), store.alone(place, KEY):
        pass


def test_only_the_newest_stay(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_MOST_FILES", 2)
    for number, key in enumerate("abc"):
        store.write(place, key, {}, {})
        os.utime(place / f"{key}.capture", (number, number))
    store.write(place, "d", {}, {})
    assert {path.stem for path in place.glob("*.capture")} == {"c", "d"}


def test_what_is_read_names_ops_alone(place: Path):
    """Names of functions that are no ops are refused: nothing that is read can run."""
    for name in (
        "os.system",
        "operator.methodcaller",
        "aten.nothing.default",
        "load_library.x.y",
        "aten.__class__.__call__",
    ):
        nodes = [["call_function", "y", ["op", name], {"tuple": []}, {"dict": []}, []]]
        with pytest.raises(ValueError, match="no op"):
            decode({"program": {"graph": nodes}, "objects": [], "texts": []}, {})


def test_the_command_counts_and_clears(place: Path):
    kept(place)
    lock = place / "of others.txt"
    lock.touch()
    shown = CliRunner().invoke(app, ["cache"])
    assert f"{place}: 1 captures" in shown.output
    cleared = CliRunner().invoke(app, ["cache", "--clear", "--format", "json"])
    assert json.loads(cleared.output)["captures"] == 1
    assert list(place.iterdir()) == [lock]


def test_the_command_uses_no_link(place: Path, tmp_path: Path):
    kept(place)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    refused = CliRunner().invoke(app, ["cache", "--clear"])
    assert refused.exit_code == 2
    assert (tmp_path / "elsewhere" / f"{KEY}.capture").exists()


def test_no_cache_is_for_one_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(store.VARIABLE, raising=False)
    assert CliRunner().invoke(app, ["plan", "none.py:none", "none.yaml", "--no-cache"]).exit_code == 2
    assert store.VARIABLE not in os.environ
