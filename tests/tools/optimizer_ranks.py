"""Shared by the tests of optimizers: the spec of a model under one, and its steps on the ranks of a layout."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from planner import Plan
from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.limits import HANG_SECONDS


class Trained(NamedTuple):
    """After some steps, on rank 0; ``measured``: bytes by category."""

    losses: list[float]
    parameters: dict[str, Tensor]
    measured: dict[str, int]


def spec_of(
    entry: families.Entry, layout: dict[str, Any], optimizer: dict[str, Any], dtype: str = "float64"
) -> dict[str, Any]:
    """``layout``: sections of the spec; its ``optimizer`` has keys beside those of ``optimizer``."""
    inputs = {
        key: {"shape": list(shape), "dtype": str(kind).removeprefix("torch.")}
        for key, (shape, kind, _) in entry.inputs.items()
    }
    return {
        "batch": {"global": 8, "micro": 2},
        "inputs": inputs,
        "precision": {"parameters": dtype},
        "tensor_parallel": {"vocabulary_multiple": 8},
        **layout,
        "optimizer": optimizer | layout.get("optimizer", {}),
    }


def steps(decided: Plan, batches: list[dict[str, Tensor]]) -> Trained:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        losses = [engine.train_step(batch).loss for batch in batches]
        return Trained(losses, engine.gather_parameters(), engine.optimizer.measured_bytes())


def trained(
    host: Any, entry: families.Entry, layout: dict[str, Any], optimizer: dict[str, Any], dtype: str, num_steps: int
) -> tuple[Trained, Plan]:
    """To be called in the laboratory."""
    decided = plan_again(entry.model, spec_of(entry, layout, optimizer, dtype))
    world = prod(layout["mesh"].get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    batches = [entry.batch(8, step) for step in range(num_steps)]
    return host.run_ranks(world, steps, decided, batches)[0], decided
