"""Local values of a rank in a step: the largest absolute value of each gradient and parameter before any reduction.

    reduce-scatter of gradients, all-gather of parameters     spread a NaN of one rank to all that share the bucket

Each tensor is read once more per step, in one pass without temporary memory. Nothing waits for it, and the host reads
the results only after a step with NaN or Inf.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isnan

import torch
from torch import Tensor

from runtime.optimizer.slots import BucketTensors, ParameterSlot

KEPT = 2  # steps: on a GPU a bad step is known only after the next one

Sizes = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Bad:
    """Dotted name → "NaN" or "infinity", for the tensors that contained one on this rank.

    ``from_others``: parameters of which this rank updated a finite part: the value may be from another rank.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    from_others: frozenset[str] = frozenset()


class Unmixed:
    """The largest absolute values of the tensors in the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Sizes, Sizes, Sizes]] = deque(maxlen=KEPT)
        self._gradients: Sizes = []
        self._has_gathered = False

    def see_gradients(self, slots: Iterable[ParameterSlot]) -> None:
        """Note the gradients of one bucket of this rank, before it is reduced."""
        self._gradients += _sizes((slot.local.fqn, slot.main_grad) for slot in slots)

    def see_parameters(self, buckets: Iterable[BucketTensors]) -> None:
        """Note all parameters before they are gathered, and end the step."""
        buckets = list(buckets)
        sizes = _sizes(entry for bucket in buckets for entry in bucket.held_parameters)
        own = sizes
        if self._has_gathered:
            own = _sizes(entry for bucket in buckets for entry in bucket.updated_parameters)
        self._has_gathered = True
        self._steps.append((sizes, own, self._gradients))
        self._gradients = []

    def begin_step(self) -> None:
        self._gradients = []

    def forget(self) -> None:
        """Forget all steps: the parameters were replaced by other values."""
        self._steps.clear()
        self._has_gathered = False

    def bad(self, ago: int) -> Bad:
        """Return the tensors that were not finite in the last step (0) or the one before (1); empty if unknown."""
        if not 0 <= ago < len(self._steps):
            return Bad()
        parameters, own, gradients = map(_bad, self._steps[-1 - ago])
        return Bad(parameters, gradients, frozenset(parameters.keys() - own.keys()))


def _sizes(named: Iterable[tuple[str, Tensor]]) -> Sizes:
    pairs = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not pairs:
        return []
    tensors = [tensor for _, tensor in pairs]
    sizes = largest_on_cpu(tensors) if tensors[0].device.type == "cpu" else torch._foreach_norm(tensors, inf)
    return [(name, size) for (name, _), size in zip(pairs, sizes, strict=True)]


def largest_on_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the largest absolute value of each tensor, or NaN. On a CPU, torch's norm takes 17 times as long."""
    bounds = [torch.aminmax(tensor) for tensor in tensors]
    return [torch.maximum(high, -low) for low, high in bounds]


def _bad(sizes: Sizes) -> dict[str, str]:
    if not sizes:
        return {}
    values = torch.stack([size.to(torch.float64) for _, size in sizes]).tolist()
    bad = {name: value for (name, _), value in zip(sizes, values, strict=True) if isnan(value) or value == inf}
    return {name: "NaN" if isnan(value) else "infinity" for name, value in bad.items()}
