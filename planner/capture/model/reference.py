"""Turn MODEL of the command line into an ``nn.Module``.

    package.module:callable     an importable function or class that returns a module
    path/file.py:callable       the same in a file; its directory is put first on the import path
    hf:DIR_OR_CONFIG.json       the Hugging Face architecture named by config.json, no weights read
    MODEL --peft CONFIG         any of these, with the adapters of an adapter_config.json

Hugging Face models are on the meta device (parameters without storage, buffers real, since rotary tables are data)
unless ``materialize`` asks for weights: those beside the config if there are any, else seeded ones.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from passes.errors import PlanError, first_line
from planner.capture.model.compiled import uncompiled
from planner.capture.model.hugging_face import hugging_face_model, import_class
from planner.capture.model.with_adapters import OPTION, with_adapters
from planner.files.text import is_directory, shorten
from planner.named_code import NamedCode, line_of

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
FORMS = "package.module:callable, path/file.py:callable, or hf:DIR_OR_CONFIG.json"


def load_model(reference: str, *, materialize: bool = False, seed: int = 1234, values_later: bool = False) -> nn.Module:
    """The module that ``reference`` names. ``materialize`` gives an ``hf:`` model real weights, the same for a seed.

    With ``values_later`` drawn weights stay on the meta device: an Engine makes those of its rank when it needs them.
    Raises PlanError for a malformed reference, anything that cannot be imported, and a callable that fails.
    """
    quiet_transformers()
    return _built(reference, materialize, seed, values_later)


def load_to_plan(reference: str, seed: int, *, has_values: bool = True) -> nn.Module:
    """The module for a command that plans and runs it: values that are not in files of ``reference`` are real, or drawn
    when an Engine needs them. ``has_values``: False if a save brings all of them. Raises as ``load_model`` does.
    """
    materialize = has_values and pretrained_directory(reference) is None
    return load_model(reference, materialize=materialize, seed=seed, values_later=True)


def import_packages(reference: str) -> None:
    """Import what ``load_model`` will need of packages, and none of the user's files."""
    base, option, _ = reference.partition(OPTION)
    if base.startswith("hf:"):
        quiet_transformers()
        import_class(Path(base.removeprefix("hf:")))
    if option:
        with suppress(ImportError):
            import_module("peft")


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
    named = NamedCode(reference, "MODEL", FORMS)
    name, attribute = named.parts
    seed_generators(seed)  # before the import: a file may build its model right there
    source = named.module(name)
    seed_generators(seed)
    return uncompiled(_call(named.found(source, attribute), reference))


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
            where=line_of(error),
            fix="name a callable that needs no arguments and returns an nn.Module",
        ) from error
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"MODEL {shorten(reference)!r} returned a {type(model).__name__}, not an nn.Module",
            fix="return the model itself",
        )
    return model
