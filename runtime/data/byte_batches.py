"""Text as bytes: batches for a language model from any text at hand, without a tokenizer or a download.

Token i is byte i of the text, 0..255. Sequence windows are drawn from (seed, step) alone, so every rank of every
layout, and a single process, see the same global batch. By the names of the spec's inputs:

    input_ids, tokens, idx    the window [length]
    labels                    the same window (Hugging Face models shift it inside)
    targets                   the window one byte later (a model that does not shift)
    attention_mask            ones        token_type_ids  zeros        position_ids  0..length-1
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planner.errors import PlanError
from planner.spec.sections import InputSpec

NUM_BYTES = 256
STDLIB = "stdlib"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


def read_text(source: str) -> np.ndarray:
    """All bytes [n] (uint8) of a file, of a directory's files in sorted order, or of Python's library for ``stdlib``.

    Raises PlanError if there is nothing to read.
    """
    files = _files(source)
    try:
        parts = [np.frombuffer(file.read_bytes(), dtype=np.uint8) for file in files]
    except OSError as error:
        raise PlanError(f"cannot read {error.filename}: {error.strerror}", where=f"--data {source}") from error
    text = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
    if not len(text):
        raise PlanError("the data holds no bytes", where=f"--data {source}", fix="name a text file, or write stdlib")
    return text


def _files(source: str) -> list[Path]:
    if source == STDLIB:
        library = Path(sysconfig.get_path("stdlib"))
        found = library.rglob("*.py")
        return sorted(file for file in found if not _LEFT_OUT.intersection(file.relative_to(library).parts))
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    raise PlanError(
        f"no file or directory {source}", where="--data", fix="name a text file or directory, or write stdlib"
    )


class ByteBatches:
    """Global batches from a text. Owns the text (uint8 [n]) and the recipe of each input."""

    def __init__(self, text: np.ndarray, inputs: Mapping[str, InputSpec], global_size: int, seed: int) -> None:
        self.text, self.global_size, self.seed = text, global_size, seed
        self.recipes = {name: _recipe(name, spec.high) for name, spec in inputs.items()}
        self.dtypes = {name: getattr(torch, spec.dtype) for name, spec in inputs.items()}
        self.length = max(spec.shape[0] for spec in inputs.values())
        if len(text) <= self.length:
            raise PlanError(
                f"the data holds {len(text)} bytes, a sequence takes {self.length + 1}",
                where="--data",
                fix="give a longer text or a shorter inputs shape",
            )

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step: every input as [global, length]."""
        starts = np.random.default_rng([self.seed, step]).integers(len(self.text) - self.length, size=self.global_size)
        windows = np.stack([self.text[s : s + self.length + 1] for s in starts.tolist()])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return {name: recipe(tokens).to(self.dtypes[name]).contiguous() for name, recipe in self.recipes.items()}


_RECIPES: dict[str, Callable[[Tensor], Tensor]] = {
    "input_ids": lambda tokens: tokens[:, :-1],
    "tokens": lambda tokens: tokens[:, :-1],
    "idx": lambda tokens: tokens[:, :-1],
    "labels": lambda tokens: tokens[:, :-1],
    "targets": lambda tokens: tokens[:, 1:],
    "attention_mask": lambda tokens: torch.ones_like(tokens[:, :-1]),
    "token_type_ids": lambda tokens: torch.zeros_like(tokens[:, :-1]),
    "position_ids": lambda tokens: torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1),
}


def _recipe(name: str, high: int | None) -> Callable[[Tensor], Tensor]:
    if name not in _RECIPES:
        raise PlanError(
            f"text as bytes cannot feed the input {name!r}",
            where=f"inputs.{name}",
            fix=f"name the inputs {', '.join(_RECIPES)}, or call runtime.Engine with batches of your own",
        )
    if name in ("input_ids", "tokens", "idx") and high is not None and high < NUM_BYTES:
        raise PlanError(
            f"inputs.{name}.high is {high}; text as bytes takes tokens up to {NUM_BYTES - 1}",
            where=f"inputs.{name}",
            fix=f"use a model with a vocabulary of at least {NUM_BYTES} and set high to it",
        )
    return _RECIPES[name]
