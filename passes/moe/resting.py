"""Weights of experts that a step does not update if no token of the global batch chose them.

    for e, expert in enumerate(experts):
        token, choice = torch.where(chosen == e)
        if token.numel() == 0: continue          # nobody asks for the gradient of expert e: it is None, no update

With stacks, and without the question, one process has a gradient of zeros there, and updates by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from passes.moe.layers import Asked, Experts
from passes.program.program import Program


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
