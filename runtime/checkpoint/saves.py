"""A directory of saves: lists them, finds the last and the intact ones, and locks the directory for one run.

step-00000012/manifest.json     a save is complete once its manifest exists
step-00000012/rank-….safetensors
step-00000012-1f2e3d4c/         the same step on another line of saves (``runtime.checkpoint.lines``)
latest                          the name of the save that was written last, and a checksum of that name
.lock                           held by the run that writes here
"""

import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from passes.errors import PlanError
from planner.files.atomic import PARTIAL, name_beside, open_lock_file, try_new_file, write_whole
from planner.files.text import writing
from runtime.checkpoint.lines import Line
from runtime.checkpoint.manifest import MANIFEST, Manifest, checksum, place_of, read_manifest
from runtime.checkpoint.pieces import PieceReader, check_files
from runtime.checkpoint.safetensors_files import check_size, read_small

LATEST, LOCK = "latest", ".lock"
_NO_LATEST = f"there is no {LATEST}"
_STEP = re.compile(r"step-([0-9]{8,12})(?:-([0-9a-f]{8}))?")


def free_name(directory: Path, step: int, line: Line) -> str:
    """Return the name for a save of ``step``: another than those of saves on other lines."""
    name = f"step-{step:08d}"
    there = place_of(directory / name)
    return name if there is None or there.is_on(line) else f"{name}-{line.id[:8]}"


def saves_in(directory: str | PathLike[str]) -> list[Path]:
    """Return all saves, by step, whether intact or not. Raises PlanError for a directory that cannot be read."""
    directory = Path(directory)
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        what, fix = f"cannot read the directory of saves: {error.strerror}", "use a directory that this user may read"
        raise PlanError(what, where=str(directory), fix=fix) from None
    by_step = sorted((int(match[1]), path) for path in entries if (match := _STEP.fullmatch(path.name)))
    return [path for _, path in by_step if os.path.lexists(path / MANIFEST)]


def without_manifest(directory: str | PathLike[str]) -> list[Path]:
    """Return directories with the name of a save that lack a manifest."""
    saves = [path for path in Path(directory).glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(path for path in saves if not os.path.lexists(path / MANIFEST))


def on_line(saves: Iterable[Path], line: Line) -> tuple[list[Path], list[Path]]:
    """Return the saves on ``line``, and those on other lines. A save with a damaged manifest is in neither list."""
    places = [(save, place) for save in saves if (place := place_of(save)) is not None]
    own = [save for save, place in places if place.is_on(line)]
    return own, [save for save, _ in places if save not in own]


def latest_in(directory: str | PathLike[str]) -> Path | None:
    """Return the save that was written last; None if there is none. Without ``latest``, the last of the youngest line.

    Raises PlanError, naming the file, if ``latest`` is damaged, or if it is absent and the lines are ambiguous.
    """
    directory = Path(directory)
    if (named := _named_in(directory)) is not None:
        return named
    return saves[-1] if (saves := _on_youngest_line(saves_in(directory), _NO_LATEST)) else None


def _named_in(directory: Path) -> Path | None:
    """Return the save that ``latest`` names; None without that file. Raises PlanError if it is damaged."""
    path = directory / LATEST
    if not os.path.lexists(path):
        return None
    name, _, digest = read_small(path, 200).decode("latin-1").removesuffix("\n").partition(" ")
    if not _STEP.fullmatch(name) or digest != checksum(name.encode()):
        raise PlanError("latest is damaged", where=str(path), fix=f"name a save: {directory}/step-…")
    return directory / name


def write_latest(directory: Path, name: str) -> None:
    """Replace the file ``latest`` atomically. Raises OSError."""
    write_whole(directory / LATEST, f"{name} {checksum(name.encode())}\n")


def resolve(directory: str | PathLike[str]) -> Path:
    """Return ``directory`` if it is a save, else the last save in it. Raises PlanError if there is none."""
    directory = Path(directory)
    if os.path.lexists(directory / MANIFEST):
        return directory
    last = latest_in(directory) if directory.is_dir() else None
    if last is None:
        is_there = "the directory has no saves" if directory.is_dir() else "directory not found"
        fix = "name the directory that `train --save` or engine.save has written"
        raise PlanError(f"nothing to load: {is_there}", where=str(directory), fix=fix)
    return last


def verify(save: Path) -> Manifest:
    """Return the manifest if every file of the save is intact. Raises PlanError, naming the file."""
    manifest = read_step(save)[0]
    check_files(save, manifest.files)
    PieceReader(save, manifest).__exit__()
    return manifest


def look(save: Path) -> Manifest:
    """Return the manifest if every file exists and has its size; their bytes are not read. Raises PlanError."""
    manifest = read_step(save)[0]
    for entry in manifest.files:
        check_size(save / entry.name, entry.bytes)
    return manifest


def check_average(save: Path, manifest: Manifest) -> None:
    """Raise PlanError if the save has no running mean of the weights."""
    if not manifest.has_average:
        fix = "remove --ema; runs with optimizer: {ema: 0.999} in their spec save the mean"
        raise PlanError("the save has no running mean of the weights", where=str(save), fix=fix)


def read_step(save: Path) -> tuple[Manifest, str]:
    """Return the manifest and its checksum. Raises PlanError, also if the directory's name has another step."""
    manifest, digest = read_manifest(save)
    match = _STEP.fullmatch(save.name)
    if match and int(match[1]) != manifest.step:
        what = f"{MANIFEST} is of step {manifest.step}: the directory belongs to another save"
        raise PlanError(what, where=str(save / MANIFEST), fix="load another save, or restore the name of the directory")
    return manifest, digest


def by_newest(directory: str | PathLike[str]) -> tuple[list[Path], list[PlanError]]:
    """Return the saves to resume from, best first: the one that ``latest`` names, then others by descending step.

    Saves on other lines are left out. Without a usable ``latest``, the line is the one that continues all others.
    Also returns errors about ``latest``. Raises PlanError if there is no such line: steps do not order lines.
    """
    directory, saves = Path(directory), saves_in(directory)
    errors: list[PlanError] = []
    last, lost = None, _NO_LATEST
    try:
        last = _named_in(directory)
    except PlanError as error:
        errors, lost = [error], error.what
    place = None if last is None else place_of(last)
    if last is not None and place is not None:
        own = [save for save in saves if save not in on_line(saves, place.line)[1]]
        return sorted(own[::-1], key=lambda path: path != last), errors
    if last is not None:
        lost = f"{LATEST} names {last.name}, which is {'damaged' if last in saves else 'gone'}"
    own = _on_youngest_line(saves, lost)
    if not errors and (len(own) < len(saves) if last is None else last not in saves):
        errors = [PlanError(lost, where=str(directory / LATEST), fix=f"name a save: {directory}/step-…")]
    return own[::-1], errors


def _on_youngest_line(saves: list[Path], lost: str) -> list[Path]:
    """Return the saves on the line that continues all others, and those with a damaged manifest.

    Raises PlanError, with ``lost`` and the last save of each line, if there is no such line.
    """
    last = {place.line.id: (save, place) for save in saves if (place := place_of(save)) is not None}
    lines = [place.line for _, place in last.values()]
    youngest = [line for line in lines if last.keys() <= {line.id, *(before for before, _ in line.before)}]
    if len(youngest) == 1 or not lines:
        return [save for save in saves if not lines or save not in on_line(saves, youngest[0])[1]]
    ends = [f"{save.name} (step {place.step}, written {_written(save)})" for save, place in last.values()]
    raise PlanError(
        f"{lost}, and {len(ends)} lines of saves are there of which none continues all others; their last saves: "
        + ", ".join(ends),
        where=str(saves[0].parent),
        fix="name the save to go on from: " + " or ".join(f"--resume {save}" for save, _ in last.values()),
    )


def _written(save: Path) -> str:
    with suppress(PlanError):
        return read_manifest(save)[0].written
    return "at an unknown time"


def prune(directory: str | PathLike[str], keep: int, line: Line | None = None) -> list[Path]:
    """Remove all but the last ``keep`` saves of a line, and return them; the save that ``latest`` names stays.

    Only the process that holds the directory's lock may call it. ``line`` None: that of the save that ``latest`` names.
    Saves on other lines stay, and do not count. Raises PlanError.
    """
    if keep < 1:
        raise PlanError(f"keep is {keep}", fix="keep at least one save")
    directory = Path(directory)
    try:
        best, _ = by_newest(directory)
    except PlanError:
        if line is None:
            raise
        best = []
    if line is None and best and (place := place_of(best[0])) is not None:
        line = place.line
    own = saves_in(directory) if line is None else on_line(saves_in(directory), line)[0]
    old = [save for save in own[:-keep] if save not in best[:1]]
    try:
        for save in old:
            gone = name_beside(save)
            save.rename(gone)  # first: a save is complete or absent
            shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        fix = "allow this user to remove files there, or remove --keep"
        raise PlanError(
            f"cannot remove old saves: {error.strerror}", where=str(error.filename or directory), fix=fix
        ) from None
    return old


def check_writable(directory: str | PathLike[str]) -> None:
    """Create the directory if it is absent, and write a file in it as a test. Raises PlanError."""
    with writing("saves here", str(directory), "use a writable directory"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        try_new_file(Path(directory) / "try")


@contextmanager
def owned(directory: str | PathLike[str]) -> Iterator[None]:
    """Hold the directory's lock inside the block; it ends with the process, even if that is killed.

    Raises PlanError, naming the other run, if another process holds it.
    """
    check_writable(directory)
    path = Path(directory) / LOCK
    try:
        opened = open_lock_file(path)
    except OSError as error:
        fix = "remove it, or use a writable directory"
        raise PlanError(f"cannot lock the directory of saves: {error.strerror}", where=str(path), fix=fix) from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another run is writing here: {file.read(200).strip() or 'its name is not known yet'}"
            raise PlanError(what, where=str(directory), fix="wait for it, stop it, or save elsewhere") from None
        except OSError as error:
            warnings.warn(
                f"{directory}: locking failed, a second run is not prevented ({error.strerror})", stacklevel=3
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        for left_over in (*path.parent.glob(f".step-*{PARTIAL}"), *path.parent.glob(f".{LATEST}*{PARTIAL}")):
            if left_over.is_dir() and not left_over.is_symlink():  # the directory of a save that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            else:
                left_over.unlink(missing_ok=True)
        yield
        file.truncate(0)
