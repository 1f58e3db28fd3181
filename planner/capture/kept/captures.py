"""Each capture is made once on this host, if its inputs are certain: the next command finds it on disk (``store``).

Its key covers all that a capture depends on: how the model was built (``sources``), the Python state that a forward may
read (``values``), the inputs, the loss and the dtype.

If any of it has no certain form, the model is captured each time. A program that is kept is read back where it was
made, too, so that a plan is the same whether its capture was read or made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from passes.canonical.decompose import HasRule
from passes.program.program import Program
from passes.rules.own import own_rule_texts
from planner.capture import export
from planner.capture.again.earlier import Earlier
from planner.capture.kept import store
from planner.capture.kept.codec import decode, encode
from planner.capture.kept.sources import facts_of, files_read, user_files, was_named
from planner.capture.kept.uncertain import Uncertain
from planner.capture.kept.values import digest_of
from planner.capture.real_forward import refuse_another_forward
from planner.slow_steps import AFTER_SECONDS, say

LOGGER = logging.getLogger("meshwright.captures")


def capture(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    has_rule: HasRule,
    loss: str = "auto",
    dtype: torch.dtype | None = None,
    is_known: bool = False,
    earlier: Earlier | None = None,
) -> Program:
    """As ``planner.capture.export.capture``, or its cached result; each time a new program. Raises PlanError."""
    asked, place = _Asked(model, inputs, has_rule, loss, dtype, is_known, earlier), store.place_of()
    return asked.made() if place is None else _kept_or_made(asked, place)


@dataclass
class _Asked:
    """One capture of a model. ``seconds``: that it took here."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    has_rule: HasRule
    loss: str
    dtype: torch.dtype | None
    is_known: bool
    earlier: Earlier | None
    name: str = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        shapes = [[name, list(x.shape), list(x.stride()), str(x.dtype)] for name, x in self.inputs.items()]
        rules = f"{self.has_rule.__module__}.{getattr(self.has_rule, '__qualname__', '')}"
        self.name = json.dumps([shapes, self.loss, str(self.dtype), self.is_known, rules, own_rule_texts()])

    def key(self) -> str:
        """Raises Uncertain."""
        facts = [facts_of(self.model), digest_of(self.model), self.name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def made(self) -> Program:
        """Captured here. Raises PlanError."""
        LOGGER.debug("captured: %s", self.name)
        start = time.monotonic()
        options: dict[str, Any] = {"loss": self.loss, "dtype": self.dtype, "is_known": self.is_known}
        options["earlier"] = self.earlier
        made = export.capture(self.model, self.inputs, has_rule=self.has_rule, **options)
        self.seconds = time.monotonic() - start
        return made

    def read(self, place: Path, key: str) -> Program | None:
        """From the disk. Raises OSError; PlanError as ``made``, for code that depends on the values of weights."""
        try:
            kept = store.read(place, key)
            program = None if kept is None else decode(*kept)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, ImportError, RuntimeError) as error:
            say(f"the cached capture {place / key}.capture is damaged, and the model is captured again: {error}")
            return None
        if program is None:
            return None
        LOGGER.debug("read: %s", key)
        if self.dtype is None and not self.is_known:
            refuse_another_forward(self.model, self.inputs, program)
        return program

    def keep(self, kept: store.Kept, place: Path, key: str, read: set[str]) -> None:
        """Raises OSError, and Uncertain if the capture itself read or changed inputs of the key."""
        if more := read - set(user_files()):
            raise Uncertain(f"the forward reads {', '.join(sorted(more))}")
        if self.key() != key:
            raise Uncertain("the forward changes the model, or imports more of it")
        store.write(place, key, *kept)
        LOGGER.debug("kept: %s", key)

    def tell(self, reason: Exception) -> None:
        """Report why it is not cached: to the user if that costs the next command seconds."""
        LOGGER.debug("not kept: %s", reason)
        is_slow = self.seconds > AFTER_SECONDS and was_named(self.model)
        if isinstance(reason, OSError):
            say(f"captures are not cached: {reason.filename}: {reason.strerror}")
        elif is_slow and store.place_of() is not None:
            say(f"the next command captures this model again: {reason}")


def _kept_or_made(asked: _Asked, place: Path) -> Program:
    """By one process of the host, while others that ask for the same wait and read it. Raises PlanError."""
    try:
        key = asked.key()
        store.make(place)
        if (found := asked.read(place, key)) is not None:
            return found
        with store.alone(place, key):
            return asked.read(place, key) or _made_and_kept(asked, place, key)
    except (Uncertain, OSError) as reason:
        made = asked.made()
        asked.tell(reason)
        return made


def _made_and_kept(asked: _Asked, place: Path, key: str) -> Program:
    with files_read() as read:
        made = asked.made()
    try:
        made, kept = settled(made)
        asked.keep(kept, place, key, read)
    except (Uncertain, OSError) as reason:
        asked.tell(reason)
    return made


def settled(program: Program) -> tuple[Program, store.Kept]:
    """The program as read back, and its kept form. Raises Uncertain if reading it back would give another program."""
    found, constants = encode(program)
    text = json.dumps(found)
    kept = json.loads(text), {name: value.clone() for name, value in constants.items()}
    again = decode(*kept)
    if json.dumps(encode(again)[0]) != text:
        raise Uncertain("the program would be another when it is read")
    return again, kept
