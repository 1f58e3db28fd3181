"""What a run and one process found, and where they differ by more than rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_STEPS = 2  # the second has moments, and is of a batch of its own
LIMITS = {torch.float64: (1e-10, 1e-8), torch.float32: (2e-6, 5e-5), torch.bfloat16: (1e-2, 5e-2)}  # loss, gradient


@dataclass
class Found:
    """What rank 0 of a run, or the one process, has after NUM_STEPS updates. Gradients are those of the first batch."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    evaluated: float
    precision: torch.dtype = torch.float64  # the lowest that the model computes in


@dataclass
class Report:
    """Every difference beyond what is allowed, in words (``of``: those of one kind), and the largest of each kind."""

    wrong: list[str]
    loss: float
    gradient: float
    parameter: float

    def of(self, *kinds: str) -> list[str]:
        return [words for words in self.wrong if words.startswith(kinds)]


def compare(found: Found, truth: Found) -> Report:
    """Hold a run against the truth; tolerances are those of the product's promise."""
    loss_limit, gradient_limit = LIMITS[truth.precision]
    wrong: list[str] = []
    loss = _values("loss", [*found.losses[:1]], truth.losses[:1], loss_limit, wrong)
    # Later losses follow updates, where Adam turns a tiny gradient's rounding into a step of its own size.
    later, expected_later = [*found.losses[1:], found.evaluated], [*truth.losses[1:], truth.evaluated]
    _values("later loss", later, expected_later, max(1e-4, loss_limit), wrong)
    _values("gradient norm", found.norms[:1], truth.norms[:1], gradient_limit, wrong)
    gradient = _gradients(found, truth, gradient_limit, wrong)
    parameter = 0.0
    for name, expected in truth.parameters.items():
        value = found.parameters.get(name)
        if value is None or value.shape != expected.shape:
            wrong.append(f"parameter {name}: {'missing' if value is None else list(value.shape)}")
            continue
        difference = (value.double() - expected.double()).abs().max().item() if value.numel() else 0.0
        parameter = max(parameter, difference)
        if not difference <= 2e-4:
            wrong.append(f"parameter {name} after {NUM_STEPS} steps: {difference:.1e}")
    wrong += [f"parameter {name}: the model has no such" for name in found.parameters.keys() - truth.parameters.keys()]
    return Report(wrong, loss, gradient, parameter)


def _values(kind: str, found: list[float], truth: list[float], limit: float, wrong: list[str]) -> float:
    if len(found) != len(truth):
        wrong.append(f"{kind}: {len(found)} of {len(truth)}")
    differences = [abs(a - b) / abs(b) for a, b in zip(found, truth, strict=False)]
    wrong += [
        f"{kind} {a!r}, one process {b!r}" for a, b, d in zip(found, truth, differences, strict=False) if not d <= limit
    ]
    return max(differences, default=0.0)


def _gradients(found: Found, truth: Found, limit: float, wrong: list[str]) -> float:
    """Each gradient relative to its own size; one that is rounding noise of the largest is measured by that."""
    largest = max(g.abs().max().item() for g in truth.gradients.values() if g is not None)
    noise = largest * (1e-7 if truth.precision is torch.float64 else 1e-3)
    worst = 0.0
    for name, expected in truth.gradients.items():
        value = found.gradients.get(name)
        if expected is None:
            if value is not None and value.abs().max() > 0:
                wrong.append(f"gradient {name}: one process has none")
            continue
        if value is None or value.shape != expected.shape:
            wrong.append(f"gradient {name}: {'missing' if value is None else list(value.shape)}")
            continue
        size = max(expected.abs().max().item(), noise)
        difference = (value.double() - expected.double()).abs().max().item() / size
        worst = max(worst, difference)
        if not difference <= limit:
            wrong.append(f"gradient {name}: {difference:.1e} of {size:.1e}")
    wrong += [f"gradient {name}: the model has no such" for name in found.gradients.keys() - truth.gradients.keys()]
    return worst
