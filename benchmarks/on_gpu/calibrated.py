"""The step of the Llama of ``profile``: predicted from data sheets and from what this GPU measured of itself; measured.

`meshwright calibrate` writes a cluster file first, without the model. The ranges are those of both files.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.models import batch, llama
from benchmarks.on_gpu.profile import MICRO, MICROBATCHES, TIMED, WARM, cluster, release, seconds_a_step, spec_of
from benchmarks.on_gpu.table import Table
from planner import Plan, capture, plan
from planner.cost.layout import CostPlan
from runtime import Engine
from runtime.calibrate.run import calibrate

WAYS: dict[str, dict[str, Any]] = {
    "no recompute": {},
    "recompute: selective": {"recompute": "selective"},
    "recompute: full": {"recompute": "full"},
    "compile: true": {"compile": True},
}
SECONDS = 20.0
LIMIT = 0.1  # of the measured time


def run(device: torch.device, *, tiny: bool = False) -> Table:
    columns = ("Llama of 1.1 billion, ms a step", "by data sheets", "range", "calibrated", "range", "measured", "error")
    table = Table("calibrated", columns)
    model, sizes = llama(tiny=tiny, attention_dropout=0.0)
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    spec, given = spec_of(length, vocabulary), batch(0, MICRO * MICROBATCHES, length, vocabulary)
    captured = capture(model, spec)
    with tempfile.TemporaryDirectory() as directory:
        own = Path(directory, "own.yaml")
        own.write_text(calibrate(1, 0.5 if tiny else SECONDS, "own"))
        print(own.read_text(), flush=True)
        for way, settings in WAYS.items():
            sheet, calibrated = (plan(captured, spec | settings | {"cluster": str(file)}) for file in (cluster(), own))
            seconds = measured(calibrated, given, device, tiny=tiny)
            error = predicted(calibrated).step_seconds / seconds - 1
            figures = *shown(predicted(sheet)), *shown(predicted(calibrated)), seconds * 1e3
            table.add(way, *figures, f"{100 * error:+.1f} %")
            if not tiny:
                table.expect(way, abs(error), LIMIT)
    return table


def predicted(made: Plan) -> CostPlan:
    assert made.cost is not None
    return made.cost


def shown(cost: CostPlan) -> tuple[float, str]:
    low, high = cost.range
    return cost.step_seconds * 1e3, f"{low * 1e3:.4g} to {high * 1e3:.4g}"


def measured(made: Plan, given: dict[str, Tensor], device: torch.device, *, tiny: bool) -> float:
    with Engine(made, device=device) as engine:
        seconds = seconds_a_step(engine, given, 1 if tiny else WARM, 1 if tiny else TIMED)
    del engine
    release(device)
    return seconds
