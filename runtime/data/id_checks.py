"""Check on the host that ids and labels of a batch are in the ranges of the model's lookups.

On a GPU, an id out of range is a device assert: a late error without the id, after which the process is unusable.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange


def check_ids(name: str, value: Tensor, ranges: Iterable[IdRange]) -> None:
    """Raise PlanError, naming the first value out of range and its place. A batch on a device is not looked at."""
    if value.device.type != "cpu":
        return
    for ids in ranges:
        part = value[(slice(None), *(slice(start, stop) for start, stop in ids.part))]
        if not part.numel():
            continue
        least, most = (int(v) for v in torch.aminmax(part))
        if ids.low <= least and most < ids.high:
            continue
        bad = (part < ids.low) | (part >= ids.high)
        if ids.skipped is not None:
            bad &= part != ids.skipped
        if bad.any():
            raise _out_of_range(name, part, bad.nonzero()[0], ids)


def _out_of_range(name: str, part: Tensor, place: Tensor, ids: IdRange) -> PlanError:
    found = int(part[tuple(place)])
    shown = [int(place[0]), *(int(i) + start for i, (start, _) in zip(place[1:], ids.part, strict=True))]
    besides = "" if ids.skipped is None else f", and skips {ids.skipped}"
    noun = "labels" if ids.unit == "classes" else "ids"
    return PlanError(
        f"batch[{name!r}] holds {found} at {shown}; {ids.what} has {ids.unit} 0 to {ids.high - 1}{besides}",
        where="batch",
        fix=f"use {noun} in this range, or a model with more {ids.unit} (its vocabulary is smaller than that of the "
        "data)",
    )
