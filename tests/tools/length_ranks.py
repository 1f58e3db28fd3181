"""One run over several lengths of a sequence, and the unmodified model trained on the same batches in one process."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from planner import plan
from runtime import Engine
from tests.models import families
from tests.tools.limits import HANG_SECONDS

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "clip_grad_norm": 1.0}
Batch = dict[str, Tensor]


def shape_of(entry: families.Entry, shares: Sequence[float]) -> tuple[int, tuple[int, ...]]:
    """The length of the sequences of ``entry``, and those that are such shares of it."""
    length = next(iter(entry.inputs.values()))[0][0]
    return length, tuple(int(length * share) for share in shares)


def spec_of(entry: families.Entry, lengths: Sequence[int], batch: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The first dim of each input has all ``lengths``."""
    inputs = {
        name: {"shape": [list(lengths), *shape[1:]], "dtype": str(dtype).removeprefix("torch.")}
        for name, (shape, dtype, _) in entry.inputs.items()
    }
    fixed = {"optimizer": {"name": "adamw", **ADAMW}, "tensor_parallel": {"vocabulary_multiple": 8}, "seed": 7}
    return {"batch": batch, "inputs": inputs, "precision": {"parameters": "float64"}, **fixed, **more}


def batches_of(entry: families.Entry, lengths: Sequence[int], numbers: Sequence[int]) -> list[Batch]:
    """A batch of each length, with its number of sequences."""
    found = []
    for seed, (length, number) in enumerate(zip(lengths, numbers, strict=True)):
        found.append({name: x[:, :length].contiguous() for name, x in entry.batch(number, seed).items()})
    return found


def alone(entry: families.Entry, batches: Sequence[Batch], dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and parameters after a step of each batch."""
    model = entry.model.to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    update = torch.optim.AdamW(trained, ADAMW["lr"], ADAMW["betas"], weight_decay=ADAMW["weight_decay"])
    losses = []
    for batch in batches:
        update.zero_grad()
        loss = entry.loss(model(**batch))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, ADAMW["clip_grad_norm"])
        update.step()
    return losses, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def steps(decided: Any, batches: Sequence[Batch]) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, parameters, and the losses of all batches at the end."""
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        losses = [engine.train_step(batch).loss for batch in batches]
        return losses, engine.gather_parameters(), [engine.evaluate(batch) for batch in batches]


def both(host: Any, name: str, shares: Sequence[float], numbers: Sequence[int], spec: dict[str, Any]) -> Any:
    """What the ranks found, and one process, over the shares of the full length in turn."""
    entry = families.build(name)
    _, lengths = shape_of(entry, shares)
    asked = spec_of(entry, sorted(set(lengths)), **spec)
    decided, batches = plan(entry.model, asked), batches_of(entry, lengths, numbers)
    world = prod(spec["mesh"].get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    found = host.run_ranks(world, steps, decided, batches)[0]
    losses, parameters = alone(families.build(name), batches, getattr(torch, asked["precision"]["parameters"]))
    return found, (losses, parameters), [(row.length, row.sequences) for row in decided.lengths]
