"""Local values of a rank in a step: the largest absolute value of each gradient and parameter before any reduction.

    reduce-scatter of gradients, all-gather of parameters     after them a NaN of one rank stands on all that share it

Each is read once more a step, in one pass without temporary memory; nothing waits for it, and the host reads it only
after a step with NaN or Inf.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from runtime.optimizer.slots import BucketTensors, ParameterSlot

KEPT = 2  # steps: on a GPU a bad step is known when the next one has run

Sizes = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Bad:
    """Dotted name → "NaN" or "infinity", for the tensors that held one on this rank.

    ``from_others``: of the parameters those of which this rank updates a finite part, after an update: the rest may
    have come from the ranks that update it.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    from_others: frozenset[str] = frozenset()


class Unmixed:
    """Owns the sizes of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Sizes, Sizes, Sizes]] = deque(maxlen=KEPT)
        self._gradients: Sizes = []
        self._has_gathered = False

    def see_gradients(self, slots: Iterable[ParameterSlot]) -> None:
        """Of one bucket of this rank, before it is reduced."""
        self._gradients += _sizes((slot.local.fqn, slot.main_grad) for slot in slots)

    def see_parameters(self, buckets: Iterable[BucketTensors]) -> None:
        """Of all, before they are gathered; it ends the step."""
        buckets = list(buckets)
        seen = _sizes(entry for bucket in buckets for entry in bucket.held_parameters)
        own = seen
        if self._has_gathered:
            own = _sizes(entry for bucket in buckets for entry in bucket.updated_parameters)
        self._has_gathered = True
        self._steps.append((seen, own, self._gradients))
        self._gradients = []

    def begin_step(self) -> None:
        self._gradients = []

    def forget(self) -> None:
        """The parameters were replaced by other values."""
        self._steps.clear()
        self._has_gathered = False

    def bad(self, ago: int) -> Bad:
        """The tensors that were not finite in the last step (0), or in the one before (1); empty if unknown."""
        if not 0 <= ago < len(self._steps):
            return Bad()
        parameters, own, gradients = map(_bad, self._steps[-1 - ago])
        return Bad(parameters, gradients, frozenset(parameters.keys() - own.keys()))


def _sizes(named: Iterable[tuple[str, Tensor]]) -> Sizes:
    given = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not given:
        return []
    tensors = [tensor for _, tensor in given]
    sizes = largest_on_cpu(tensors) if tensors[0].device.type == "cpu" else torch._foreach_norm(tensors, inf)
    return [(name, size) for (name, _), size in zip(given, sizes, strict=True)]


def largest_on_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of each the largest absolute value; NaN if it holds one. There torch's norm takes 17 times as long."""
    bounds = [torch.aminmax(tensor) for tensor in tensors]
    return [torch.maximum(high, -low) for low, high in bounds]


def _bad(sizes: Sizes) -> dict[str, str]:
    if not sizes:
        return {}
    values = torch.stack([size.to(torch.float64) for _, size in sizes]).tolist()
    found = {name: value for (name, _), value in zip(sizes, values, strict=True) if isnan(value) or value == inf}
    return {name: "NaN" if isnan(value) else "infinity" for name, value in found.items()}
