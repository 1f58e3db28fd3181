"""The two modes of an engine: it trains, or it evaluates and holds nothing that only training needs."""

from __future__ import annotations

from typing import Literal, get_args

from passes.errors import PlanError

Mode = Literal["train", "evaluate"]


def check_mode(mode: str) -> None:
    """Raise PlanError for a mode that there is not."""
    if mode not in get_args(Mode):
        known = " or ".join(map(repr, get_args(Mode)))
        raise PlanError(f"an engine has no mode {mode!r}", where="Engine(mode=…)", fix=f"use {known}")


def need_training(mode: Mode, name: str) -> None:
    """Raise PlanError if an engine in this mode has no gradients and no optimizer state for the call ``name``."""
    if mode != "train":
        raise PlanError(
            f"{name} needs gradients or optimizer state, and an engine with mode {mode!r} has none",
            where=name,
            fix='make the engine with Engine(plan), or Engine(plan, mode="train")',
        )
