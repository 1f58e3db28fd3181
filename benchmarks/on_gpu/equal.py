"""One GPU computes what the CPU does: float32, no TF32; GPT-2, Llama and BERT, no dropout.

loss, every gradient          of the first batch
every parameter               after three updates
largest difference of a tensor, in parts of its largest element

A gradient that is zero but for rounding (of a key's bias: softmax takes a constant away) has no relative error, and
AdamW turns its rounding into updates of full size: tensors below a millionth of the largest gradient are left out.
"""

from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor

from benchmarks.on_gpu.models import SMALL, batch, planned, small
from benchmarks.on_gpu.table import Table
from planner import Plan
from runtime import Engine

STEPS = 3
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-3
ROUNDING = 1e-6  # of the largest gradient
PARAMETER_LIMIT = 1e-2  # AdamW divides by the root of a moment: of a gradient near zero it keeps the sign alone


@dataclass(frozen=True)
class Run:
    """The results of three steps."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def run(device: torch.device, *, tiny: bool = False) -> Table:
    exact_products()
    table = Table("equal", ("model", "loss", "gradients", "worst gradient", "parameters", "worst parameter"))
    for name in SMALL[:1] if tiny else SMALL:
        on_cpu, here = (steps(planned(model), place) for model, place in ((small(name), "cpu"), (small(name), device)))
        compare(table, name, here, on_cpu)
    return table


def compare(table: Table, name: str, found: Run, truth: Run) -> None:
    """Add a row, and note figures that are out of reach."""
    loss = abs(found.loss - truth.loss) / abs(truth.loss)
    moved = [name for name in truth.gradients if name not in resting(truth.gradients)]
    gradient, parameter = (
        worst(*({n: run[n] for n in moved} for run in runs))
        for runs in ((found.gradients, truth.gradients), (found.parameters, truth.parameters))
    )
    table.add(name, loss, gradient[0], gradient[1], parameter[0], parameter[1])
    limits = (("loss", loss, LOSS_LIMIT), ("gradients", gradient[0], GRADIENT_LIMIT))
    for what, value, limit in (*limits, ("parameters", parameter[0], PARAMETER_LIMIT)):
        table.hold(f"{name}, {what}", value, limit)


def steps(decided: Plan, device: torch.device | str | None, timeout_seconds: float = 600.0) -> Run:
    with Engine(decided, device=device, timeout_seconds=timeout_seconds) as engine:
        loss = engine.forward_backward(batch(0))
        gradients = engine.gather_gradients()
        engine.optimizer_step()
        for step in range(1, STEPS):
            engine.train_step(batch(step))
        return Run(loss, gradients, engine.gather_parameters())


def resting(gradients: dict[str, Tensor]) -> set[str]:
    """Tensors with a gradient that is zero but for rounding."""
    sizes = {name: gradient.abs().max().item() for name, gradient in gradients.items()}
    return {name for name, size in sizes.items() if size < ROUNDING * max(sizes.values())}


def worst(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any tensor, in parts of that tensor's largest element, and its name."""
    assert found.keys() == truth.keys(), "not the same tensors"
    return max((relative(found[name], truth[name]), name) for name in truth)


def relative(found: Tensor, truth: Tensor) -> float:
    largest = truth.abs().max().item()
    difference = (found.double() - truth.double()).abs().max().item()
    found_relative = difference / largest if largest else difference
    return found_relative if isfinite(found_relative) else inf


def exact_products() -> None:
    """Products of float32 in float32, on whatever device."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
