"""A parameter's part in experts: a stack of all of them, or of one alone; this decides which ep ranks hold it.

stack    [.., E, ..] → [.., E / ep, ..]      ep rank r has experts r·E/ep … (r + 1)·E/ep
alone    of expert e: complete on ep rank e // (E / ep), absent on others
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.moe.layers import Experts


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A parameter of ``num_experts`` experts: stacked on ``dim``, or (``dim`` is -1) of expert ``number`` alone."""

    num_experts: int
    dim: int = -1
    number: int = -1

    def first(self, ep: int, ep_rank: int) -> int:
        """The first expert of an ep rank."""
        return ep_rank * (self.num_experts // ep)

    def is_held(self, ep: int, ep_rank: int) -> bool:
        """Whether an ep rank has any of it."""
        return self.dim >= 0 or self.owner(ep) == ep_rank

    def owner(self, ep: int) -> int:
        """The ep rank that holds the parameter of one expert alone."""
        return self.number // (self.num_experts // ep)

    def local_shape(self, shape: tuple[int, ...], ep: int) -> tuple[int, ...]:
        """The part of ``shape`` on a rank that holds it."""
        return tuple(n // ep if d == self.dim else n for d, n in enumerate(shape))


def expert_parts(experts: Experts) -> dict[str, ExpertPart]:
    """Placeholder of a parameter → its part in the experts of its layer; nothing for all other parameters."""
    found: dict[str, ExpertPart] = {}
    for layer in experts.layers:
        for weight in layer.weights:
            for number, name in enumerate(weight.nodes):
                is_stack = weight.dim >= 0
                found[name] = ExpertPart(layer.num_experts, weight.dim, -1 if is_stack else number)
    return found
