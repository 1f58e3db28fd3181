"""The jobs of ranks that train, save and load adapters of peft."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runtime import Engine
from tests.tools.limits import HANG_SECONDS

Batches = list[dict[str, Tensor]]


def trained_and_saved(plan: Any, batches: Batches, directory: str) -> dict[str, Tensor]:
    """Parameters on rank 0 after a step; ``directory`` has adapters/ and, if they can be merged, merged/."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        engine.save_adapters(f"{directory}/adapters")
        if hasattr(plan.hub.adapted.module, "merge_and_unload"):
            engine.save_merged(f"{directory}/merged", max_shard_bytes=20_000)
        return engine.gather_parameters()


def loaded(plan: Any, batches: Batches, directory: str) -> tuple[dict[str, Tensor], float]:
    """Parameters on rank 0 after loading, and the loss of the next step."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.load_adapters(f"{directory}/adapters")
        parameters = engine.gather_parameters()
        return parameters, engine.train_step(batches[1]).loss
