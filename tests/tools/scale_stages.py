"""Stages that do next to nothing: each multiplies by a weight of 2, and the last adds up.

loss = Σ over microbatches m and elements of 2^stages · (m + 1)        gradient of each weight = loss / 2
"""

from typing import Any

import torch
from torch import Tensor, nn

from passes.base import StageModule
from planner.fold import stages_of
from planner.pipeline.schedule import Schedule
from tests.tools.handmade_stages import boundary


class Scale(nn.Module):
    """One stage: x · weight, and the sum of it on the last stage. ``flag`` crosses beside it and has no gradient."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.is_last = is_last

    def forward(self, x: Tensor, flag: Tensor | None = None) -> tuple[Tensor, ...]:
        out = (x * self.weight).sum() if self.is_last else x * self.weight
        return (out,) if flag is None or self.is_last else (out, flag)


def scale_stages(pp_rank: int, schedule: Schedule, num_elements: int, *, with_flag: bool = False) -> list[StageModule]:
    """The stages of one pp rank. ``with_flag``: an int64 value without a gradient crosses every boundary too."""
    pp, num_stages = schedule.pp, schedule.num_stages
    own = stages_of(pp_rank, pp, num_stages, schedule.fold)
    return [_stage(index, chunk, num_stages, num_elements, with_flag) for chunk, index in enumerate(own)]


def _stage(index: int, chunk: int, num_stages: int, num_elements: int, with_flag: bool) -> StageModule:
    first, last = index == 0, index == num_stages - 1
    crossing = [boundary("h", (num_elements,), torch.float32)]
    if with_flag:
        crossing.append(boundary("flag", (2,), torch.int64, requires_grad=False))
    receives, sends = () if first else tuple(crossing), () if last else tuple(crossing)
    inputs = () if not first else ("x", "flag") if with_flag else ("x",)
    module: Any = Scale(last)
    return StageModule(index, chunk, module, receives, sends, inputs, (), (), (), {}, last)


def scale_batches(num_microbatches: int, num_elements: int) -> list[dict[str, Tensor]]:
    flag = torch.tensor([1, -1])
    return [{"x": torch.full((num_elements,), m + 1.0), "flag": flag + m} for m in range(num_microbatches)]


def scale_loss(num_stages: int, num_microbatches: int, num_elements: int) -> float:
    return 2.0**num_stages * num_elements * num_microbatches * (num_microbatches + 1) / 2
