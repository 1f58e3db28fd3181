"""Files that are written whole or not at all, beside which anything may lie."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from planner.files import atomic
from planner.files.atomic import open_lock_file, replaced_file, try_new_file, write_for_user, write_new, write_whole
from runtime.fuzz.forks import in_fork
from tests.tools.limits import HANG_SECONDS


def test_a_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in ("old", "new"):
        write_whole(path, content)
        assert path.read_text() == content
    with suppress(ZeroDivisionError), replaced_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    try_new_file(path)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_in_the_place_of_the_file_beside_is_never_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even by one who could foresee the name."""
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    monkeypatch.setattr(atomic, "name_beside", lambda path: path.with_name(".foreseen.partial"))
    (tmp_path / ".foreseen.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(path, "new")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / ".foreseen.partial", b"new")
    assert victim.read_text() == "precious"
    assert (tmp_path / ".foreseen.partial").is_symlink()


def test_names_beside_are_not_foreseen(tmp_path: Path) -> None:
    assert len({atomic.name_beside(tmp_path / "file") for _ in range(100)}) == 100
    write_whole(tmp_path / ("ü" * 120), "a name that is nearly too long")


def test_a_link_of_the_users_own_is_followed_and_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_for_user(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_for_user(tmp_path / "pipe", "text")
    reader.join(HANG_SECONDS)
    assert found == ["text"]
    with pytest.raises(IsADirectoryError):
        write_for_user(tmp_path, "text")


def modes_under(umask: int, path: Path) -> tuple[int, bool]:
    """The permissions of a new file, and whether the umask of the process stood still."""
    os.umask(umask)
    calls: list[int] = []
    real, os.umask = os.umask, lambda mask: calls.append(mask) or real(mask)
    write_whole(path, "text")
    return path.stat().st_mode & 0o777, calls == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_the_umasks_which_no_thread_sees_changed(tmp_path: Path, umask: int, mode: int) -> None:
    assert in_fork(modes_under, umask, tmp_path / "file") == (mode, True)


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["a link", "a directory", "a pipe", "a file with more than one hard link"])
def test_a_lock_is_a_regular_file_of_one_name(tmp_path: Path, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / ".lock"
    victim.write_text("precious")
    make = {"a link": path.symlink_to, "a file with more than one hard link": path.hardlink_to}
    if kind in make:
        make[kind](victim)
    elif kind == "a directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(OSError, match=f"[.]lock is {kind}: remove it"):
        open_lock_file(path)
    assert victim.read_text() == "precious"
