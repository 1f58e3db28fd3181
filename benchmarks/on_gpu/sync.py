"""No host stop from the first forward of a step to the end of its update, by CUDA's own word.

``torch.cuda.set_sync_debug_mode("error")`` raises if the host would wait for the device. The batch is placed before;
the full step is tried as well, and its first stop is reported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.on_gpu.models import SMALL, batch, planned, small
from benchmarks.on_gpu.table import Table
from runtime import Engine

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"parameters": "bfloat16"},
    "float16": {"parameters": "float16", "loss_scale": "dynamic"},
}


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("sync", ("model", "precision", "dropout", "from the first forward", "whole step"))
    for name in SMALL[:1] if tiny else SMALL:
        for precision, section in PRECISIONS.items():
            with Engine(planned(small(name, dropout=True), precision=section), device=device) as engine:
                for step in range(2):
                    engine.train_step(batch(step))
                inner, whole = first_stop(engine, from_forward=True), first_stop(engine, from_forward=False)
            table.add(name, precision, True, inner or "none", whole or "none")
            if inner:
                table.failed.append(f"{name}, {precision}: {inner}")
    return table


def first_stop(engine: Engine, *, from_forward: bool) -> str:
    """The innermost line that would have made the host wait in a step; empty for none."""
    try:
        with no_stops(engine, from_forward=from_forward):
            engine.train_step(batch(2))
    except Exception as error:
        cause = error.__cause__ or error
        if "synchroniz" not in str(cause):
            raise
        return " ".join(str(cause).split())[:120]
    return ""


@contextmanager
def no_stops(engine: Engine, *, from_forward: bool) -> Iterator[None]:
    """Within, a stop of the host raises; ``from_forward``: from the first forward of a stage on."""
    if engine.groups.device.type != "cuda":
        yield  # nothing to wait for
        return
    stages = [stage.module for stage in engine.program.stages] if from_forward else []
    hooks = [module.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error")) for module in stages]
    try:
        if not from_forward:
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for hook in hooks:
            hook.remove()
