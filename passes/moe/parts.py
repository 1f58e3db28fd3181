"""A parameter's part in experts: which ep ranks hold it, and whether a step updates it.

stack    [.., E, ..] → [.., E / ep, ..]      ep rank r has experts r·E/ep … (r + 1)·E/ep
alone    of expert e: complete on ep rank e // (E / ep), absent on others

A step does not update weights of experts that no token of the global batch chose, if the model asks for these tokens:

    for e, expert in enumerate(experts):
        token, choice = torch.where(chosen == e)
        if token.numel() == 0: continue          # nobody asks for the gradient of expert e: it is None, no update

With stacks, and without the question, one process has a gradient of zeros there, and updates by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.moe.layers import Asked, Experts
from passes.program.program import Program


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


# ---- weights that rest


def asked_of(program: Program, experts: Experts) -> tuple[Asked, ...]:
    """The layers with choices that a step counts, with their places among its figures."""
    found: list[Asked] = []
    for layer in experts.layers:
        if any(_skipped(program, name) for weight in layer.weights if weight.dim < 0 for name in weight.nodes):
            start = sum(asked.size for asked in found)
            found.append(Asked(layer.chosen, layer.num_experts, start))
    return tuple(found)


def resting(program: Program, experts: Experts) -> Mapping[str, tuple[int, ...]]:
    """Parameter, by dotted name → the figures of a step: it rests if all of them are zero."""
    starts = {asked.chosen: asked.start for asked in asked_of(program, experts)}
    found: dict[str, tuple[int, ...]] = {}
    for layer in experts.layers:
        for weight in layer.weights:
            for number, name in enumerate(weight.nodes if weight.dim < 0 else ()):
                if _skipped(program, name):
                    fqn = program.parameters[name]
                    found[fqn] = (*found.get(fqn, ()), starts[layer.chosen] + number)
    return found


def _skipped(program: Program, name: str) -> bool:
    return program.parameters.get(name) in program.skipped
