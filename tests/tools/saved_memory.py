"""What autograd really keeps of a stage module: ranks as threads, under the hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from passes.base import RankProgram, StageModule
from planner import Plan
from planner.trace.trace import StageTrace
from tests.tools.simulated_mesh import Batch, Spread, given_to


@dataclass
class Kept:
    """Memory of one rank by its place in the process → bytes; ``tensors`` keep it there."""

    bytes_at: dict[int, int]
    tensors: list[Tensor]

    @property
    def total(self) -> int:
        return sum(self.bytes_at.values())


def kept_by(run: Callable[[], Any], outside: Iterable[Tensor]) -> tuple[Any, Kept]:
    """What ``run`` returns, and all memory that it saved, but for that of ``outside``."""
    apart = {place_of(t) for t in outside}
    kept = Kept({}, [])

    def pack(tensor: Tensor) -> Tensor:
        if place_of(tensor) not in apart:
            kept.bytes_at[place_of(tensor)] = tensor.untyped_storage().nbytes()
        kept.tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), kept


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def held_by(stage: StageModule) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers()]


def measured(
    make: Callable[[], nn.Module], batch: Batch, mesh: Mapping[str, int], **more: Any
) -> tuple[Plan, list[Kept]]:
    """One microbatch of every rank of a mesh without pipeline, forward alone."""
    spread = Spread(make, batch, mesh, **more)
    return spread.plan, spread.run(_kept)


def _kept(program: RankProgram, batch: Batch, totals: list[Tensor]) -> Kept:
    (stage,) = program.stages
    given = given_to(stage, batch, totals)
    loss, kept = kept_by(lambda: stage.module(*given), [*held_by(stage), *given])
    assert loss[-1].requires_grad
    return kept


def kept_bytes(trace: StageTrace) -> int:
    """All that autograd keeps of one microbatch, as a trace has it."""
    return sum(trace.kept.values()) + trace.hidden
