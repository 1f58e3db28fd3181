"""Everything that decided how this process built a model: source files, files read, packages, environment, devices.

A process that finds the same builds the same model and captures the same graph. A model that was not built by
``load_model``, or after a model of other files in the same process, raises Uncertain, and so does code of the user
that may ask anything else (``certain_code``).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from planner.capture.kept.certain_code import check_code
from planner.capture.kept.uncertain import Uncertain
from planner.capture.own_loss.with_loss import model_of
from planner.capture.python.modules import users_modules

# Of a rank, a launcher or a terminal: other in processes that share a capture. All other variables stand in the key.
_OF_RANKS = """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE
    MASTER_ADDR MASTER_PORT OMP_NUM_THREADS SLURM_PROCID SLURM_LOCALID SLURM_TASK_PID SLURM_GTIDS
    TORCH_NCCL_ASYNC_ERROR_HANDLING GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME
"""
_OF_TERMINALS = """
    PWD OLDPWD SHLVL _ COLUMNS LINES TERM TERM_PROGRAM TERM_SESSION_ID COLORTERM WINDOWID TTY TMUX TMUX_PANE
    SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK
"""
_OF_A_PROCESS = frozenset((*_OF_RANKS.split(), *_OF_TERMINALS.split(), "TRANSFORMERS_VERBOSITY"))  # which we set
_OURS = ("TORCHELASTIC_", "MESHWRIGHT_")
_HOUSES = Path(__file__).resolve().parents[3]
_OUR_ROOTS = tuple(str(_HOUSES / name) + os.sep for name in ("planner", "passes", "runtime", "specs"))
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "scripts"))
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_METADATA = (".dist-info", ".egg-info")  # the ends of directories
_LARGE = 16 << 20  # bytes: of a larger file, size and time represent the content

_reading: list[set[str]] = []  # of those that watch now
_origins: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()
_built: set[str] = set()


@dataclass(frozen=True, slots=True)
class Origin:
    """MODEL of the command line, the seed, files that were read meanwhile; whether nothing else was built before."""

    reference: str
    seed: int
    read: frozenset[str]
    is_first: bool

    @property
    def is_hub(self) -> bool:
        return self.reference.startswith("hf:")


@contextmanager
def files_read() -> Iterator[set[str]]:
    """Inside, the files that Python opens to read, other than those of installed packages and our own."""
    _watch_files()
    _reading.append(found := set())
    try:
        yield found
    finally:
        _reading[:] = [other for other in _reading if other is not found]


@lru_cache(1)
def _watch_files() -> None:
    sys.addaudithook(_note_opened)  # for good: a hook cannot be taken back


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _reading and isinstance(arguments[0], (str, bytes)) and not _makes(arguments[2]):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        is_of_imports = path.endswith(".pyc") or path in sys.path  # an archive that may lie there, with modules in it
        is_known = _is_installed(path) or _is_metadata(path)
        if not (is_of_imports or is_known or path.startswith((*_OUR_ROOTS, *_NO_FILES))):
            for found in _reading:
                found.add(path)


def _makes(flags: Any) -> bool:
    """Whether nothing is read that lay there before."""
    return isinstance(flags, int) and bool(flags & (os.O_EXCL | os.O_TRUNC | os.O_WRONLY))


def note_origin(model: nn.Module, reference: str, seed: int, read: set[str]) -> None:
    """``model`` was built from ``reference`` in this process."""
    found = _origins[model] = Origin(reference, seed, frozenset(read), is_first=not _built - {reference})
    if not found.is_hub:
        _built.add(reference)


def was_named(model: nn.Module) -> bool:
    """Whether MODEL of a command line named it."""
    return model_of(model) in _origins


def facts_of(model: nn.Module) -> dict[str, Any]:
    """All of it, as JSON can hold it. Raises Uncertain."""
    origin = _origins.get(model_of(model))
    if origin is None:
        raise Uncertain("the model was not built by load_model")
    if not origin.is_first:
        raise Uncertain("this process has built another model before, from other files")
    own = user_files()
    for path in own:
        check_code(Path(path), _own_packages(), _is_of_a_process)
    files = sorted({*own, *(() if origin.is_hub else origin.read)})  # a config of hf: is in the model itself
    return {
        "reference": "hf:" if origin.is_hub else [origin.reference, os.getcwd(), origin.seed],
        "files": {path: _content_of(path) for path in files},
        "ours": our_sources(),
        "packages": _installed(),
        "edited": _stamps(model),
        "environment": {name: text for name, text in sorted(os.environ.items()) if not _is_of_a_process(name)},
        "versions": [sys.version, platform.platform(), torch.__version__, torch.version.git_version, torch.__file__],
        "devices": [torch.accelerator.device_count(), torch.version.cuda, torch.version.hip],
        "settings": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
    }  # fmt: skip


def _is_of_a_process(name: str) -> bool:
    return name in _OF_A_PROCESS or name.startswith(_OURS)


def user_files() -> list[str]:
    """Source files of the modules that are neither installed nor ours. Raises Uncertain for one without a source."""
    return sorted({path for _, path in _user_modules()})


def _own_packages() -> set[str]:
    """By which names user's files are imported: those of modules, and of folders above them."""
    names = {name.partition(".")[0] for name, _ in _user_modules()}
    return names | {Path(path).stem for _, path in _user_modules()}


def _user_modules() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__main__" and not isinstance(path, str) and multiprocessing.parent_process() is None:
            raise Uncertain("the main program is no file")  # that of a process that another one forked has no code
        if not isinstance(path, str) or name.startswith("torch."):
            continue  # torch gives some of its modules names of files that are none
        path = os.path.abspath(path)
        if not (_is_installed(path) or path.startswith(_OUR_ROOTS)):
            if not path.endswith(".py"):
                raise Uncertain(f"the module {name} has no source")
            yield name, path


def _is_installed(path: str) -> bool:
    return "/site-packages/" in path or "/dist-packages/" in path or path.startswith(_INSTALLED)


def _is_metadata(path: str) -> bool:
    """Whether ``importlib.metadata`` finds an installed package by it: a checkout on the path may have one."""
    of_package = Path(path).parent
    return of_package.name.endswith(_METADATA) and str(of_package.parent) in map(os.path.abspath, sys.path)


def _content_of(path: str) -> str:
    try:
        if os.stat(path).st_size > _LARGE:
            return _stamp(path)
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "none"  # looked up, and absent
    except OSError as error:
        raise Uncertain(f"{path} cannot be read again") from error


def _stamps(model: nn.Module) -> list[str]:
    """Stamps of all sources of the installed packages that define the model's classes: they may be edited in place."""
    found: set[str] = set()
    for module in users_modules(model):
        package = sys.modules.get(module.__name__.partition(".")[0], module)
        for place in (*getattr(package, "__path__", ()), module.__file__ or ""):
            if _is_installed(place):
                found.update(map(_stamp, map(str, Path(place).rglob("*.py")) if os.path.isdir(place) else [place]))
    return sorted(found)


def _stamp(path: str) -> str:
    status = os.stat(path)
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"


@lru_cache(1)
def our_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(path for house in ("planner", "passes") for path in (_HOUSES / house).rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(_HOUSES)}:{len(content)}:".encode() + content)
    return found.hexdigest()


def _installed() -> list[str]:
    """The installed packages with versions: the names of their metadata directories.

    The name of a checkout's says no version: sizes and times of its files do.
    """
    endings = (*_METADATA, ".egg-link", ".pth")
    places = dict.fromkeys(map(os.path.abspath, sys.path))
    found = [f"{place}/{name}" for place in places for name in _listed(place) if name.endswith(endings)]
    metadata = [path for path in found if path.endswith(_METADATA) and not _is_installed(path)]
    return [*found, *(_stamp(f"{path}/{name}") for path in metadata for name in _listed(path))]


def _listed(place: str) -> list[str]:
    try:
        return sorted(os.listdir(place))
    except OSError:
        return []
