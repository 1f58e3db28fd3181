"""Jobs of ranks that keep shards of weights: files of the weights, and the bytes that are whole meanwhile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runtime import Engine
from tests.tools.limits import HANG_SECONDS

Batches = list[dict[str, Tensor]]


def saved_and_loaded(plan: Any, batches: Batches, directory: str) -> dict[str, Any]:
    """After a step: full parameters, then those of an engine that loads what this one wrote."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        trained = engine.gather_parameters()
        engine.save_pretrained(directory)
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        weights = engine.optimizer.buffers.weights
        weights.most_bytes = 0
        engine.load_pretrained(directory)
        loaded = engine.gather_parameters()
        sizes = [bucket.parameters.nbytes for buffer in engine.optimizer.buffers.buffers for bucket in buffer.buckets]
        return {"trained": trained, "loaded": loaded, "whole": weights.most_bytes, "largest": max(sizes)}


def losses_and_bits(plan: Any, batches: Batches) -> dict[str, Any]:
    """Losses of three steps, and the parameters then."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        losses = [engine.train_step(batch).loss for batch in batches[:3]]
        return {"losses": losses, "parameters": engine.gather_parameters()}
