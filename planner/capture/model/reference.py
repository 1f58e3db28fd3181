"""Turn MODEL of the command line into an ``nn.Module``.

    package.module:callable     an importable function or class that returns a module
    path/file.py:callable       the same in a file; its directory is put first on the import path
    hf:DIR_OR_CONFIG.json       the Hugging Face architecture named by config.json, no weights read
    MODEL --peft CONFIG         any of these, with the adapters of an adapter_config.json

Hugging Face models are on the meta device (parameters without storage, buffers real, since rotary tables are data)
unless ``materialize`` asks for weights: those beside the config if there are any, else seeded ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import random
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from passes.errors import PlanError, Where, first_line
from planner.capture.kept.sources import files_read, note_origin
from planner.capture.model.hugging_face import hugging_face_model
from planner.capture.model.with_adapters import OPTION, with_adapters
from planner.files.text import is_directory, is_file, shorten
from planner.shadow import OUR_PACKAGES

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
FORMS = "package.module:callable, path/file.py:callable, or hf:DIR_OR_CONFIG.json"


def load_model(reference: str, *, materialize: bool = False, seed: int = 1234, values_later: bool = False) -> nn.Module:
    """The module that ``reference`` names. ``materialize`` gives an ``hf:`` model real weights, the same for a seed.

    With ``values_later`` drawn weights stay on the meta device: an Engine makes those of its rank when it needs them.
    Raises PlanError for a malformed reference, anything that cannot be imported, and a callable that fails.
    """
    quiet_transformers()
    with files_read() as read:
        model = _built(reference, materialize, seed, values_later)
    note_origin(model, reference, seed, read)
    return model


def _built(reference: str, materialize: bool, seed: int, values_later: bool) -> nn.Module:
    base, option, adapters = reference.partition(OPTION)
    if option:
        return with_adapters(
            lambda materialized: _built(base, materialized, seed, False),
            base.removeprefix("hf:"),
            Path(adapters),
            materialize,
            pretrained_directory(base) is not None,
            values_later,
            partial(seed_generators, seed + 1),
        )
    if reference.startswith("hf:"):
        seed_generators(seed)
        path = Path(reference.removeprefix("hf:"))
        return hugging_face_model(path, materialize, partial(seed_generators, seed) if values_later else None)
    name, colon, attribute = reference.rpartition(":")
    if not colon or not name or not attribute:
        raise PlanError(f"MODEL {shorten(reference)!r} has an unknown form", fix=f"write {FORMS}")
    seed_generators(seed)  # before the import: a file may build its model right there
    source = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    seed_generators(seed)
    return _call(_attribute(source, attribute, reference), reference)


def quiet_transformers() -> None:
    """Silence transformers' advice for direct callers of a model, now and later, unless TRANSFORMERS_VERBOSITY asks for
    it.
    """
    logger = logging.getLogger("transformers")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"transformers\b")
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logger.setLevel(logging.ERROR)


def seed_generators(seed: int) -> None:
    """Torch's generators, Python's and NumPy's: a constructor may draw from any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def pretrained_directory(reference: str) -> Path | None:
    """The directory of ``hf:DIR`` if it holds weights, in any format; None for every other MODEL."""
    directory = Path(reference.partition(OPTION)[0].removeprefix("hf:"))
    if not reference.startswith("hf:") or not is_directory(directory):
        return None
    return directory if any(next(directory.glob(kind), None) for kind in WEIGHT_FILES) else None


def _import_module(name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code: it may derive from any class
        raise _import_error(f"module {shorten(name)!r}", error, Path.cwd()) from error


def _import_file(path: Path) -> ModuleType:
    if not is_file(path):
        raise PlanError(f"no file {shorten(path)}", where="MODEL", fix=f"write {FORMS}")
    directory = path.resolve().parent
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None, path
    assert spec.loader is not None, path
    source = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, source)
    try:
        spec.loader.exec_module(source)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code: it may derive from any class
        sys.modules.pop(path.stem, None)
        raise _import_error(f"file {path}", error, directory) from error
    return source


def _import_error(what: str, error: BaseException, directory: Path) -> PlanError:
    missing = getattr(error, "name", None) or ""
    package = missing.partition(".")[0]
    if isinstance(error, ImportError) and package in OUR_PACKAGES and (directory / package).exists():
        return PlanError(
            f"{what} imports its own {package!r}, but meshwright's package of this name is loaded instead",
            where=Where(file=str(directory / package)),
            fix=f"rename the directory {package!r}, or import it through a parent package",
        )
    return PlanError(
        f"{what} cannot be imported: {first_line(error)}",
        where=_line_of(error),
        fix=f"check the name and the import path; MODEL is {FORMS}",
    )


def _attribute(source: ModuleType, attribute: str, reference: str) -> Any:
    value: Any = source
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            known = [name for name in vars(source) if not name.startswith("_") and callable(getattr(source, name))]
            raise PlanError(
                f"MODEL {shorten(reference)!r}: no {shorten(attribute)!r} in {source.__name__}",
                where=Where(file=source.__file__ or ""),
                fix=f"name one of its callables: {', '.join(known[:12]) or 'none is defined'}",
            ) from None
    return value


def _call(build: Any, reference: str) -> nn.Module:
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise PlanError(
            f"MODEL {shorten(reference)!r} is a {type(build).__name__}, not a callable",
            fix="name a function that returns a model",
        )
    try:
        model = build()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the user's code: it may derive from any class
        raise PlanError(
            f"MODEL {shorten(reference)!r} failed when called without arguments: {first_line(error)}",
            where=_line_of(error),
            fix="name a callable that needs no arguments and returns an nn.Module",
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"MODEL {shorten(reference)!r} returned a {type(model).__name__}, not an nn.Module",
            fix="return the model itself",
        )
    return model


def _line_of(error: BaseException) -> Where | None:
    """The user's own line under ``error``: the deepest one outside of installed packages."""
    if isinstance(error, SyntaxError):
        return Where(file=error.filename or "", line=error.lineno or 0, code=(error.text or "").strip())
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).resolve())
    outside = [
        f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<") and f.filename != ours
    ]
    user = [f for f in outside if not f.filename.startswith(sys.base_prefix)]
    if not user:
        return None
    return Where(file=user[-1].filename, line=user[-1].lineno or 0, code=user[-1].line or "")
