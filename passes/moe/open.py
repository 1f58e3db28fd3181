"""open_experts(program, experts, mesh): inserts the exchange of rows if experts have axes of their own.

A layer that cannot be distributed is refused here, before any decision: none is skipped silently.
"""

from __future__ import annotations

from passes.errors import PlanError
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts
from passes.moe.opening import open_stacks
from passes.moe.opening_branches import open_branches
from passes.moe.opening_pairs import open_pairs
from passes.moe.opening_slot_branches import open_slot_branches
from passes.moe.opening_slots import open_slots
from passes.program.program import Program
from passes.types.sizes import Sizes


def open_experts(program: Program, experts: Experts, mesh: Sizes) -> Experts:
    """Rewrite ``program`` at each layer of experts; returns the layers with their new calls. Raises PlanError for sizes
    that do not fit the mesh, and for layers that are not understood.
    """
    if not mesh.has_expert_axes:
        return experts
    if experts.doubts:
        raise _not_understood(experts.doubts[0])
    if not experts.layers:
        raise PlanError(
            f"ep = {mesh.ep}, etp = {mesh.etp}: the model has no experts with a router",
            where="mesh.ep" if mesh.ep > 1 else "mesh.etp",
            fix="set ep: 1 and remove etp",
        )
    for layer in experts.layers:
        _check_sizes(program, layer, mesh)
    opened = tuple(_opened(program, layer) for layer in experts.layers)
    program.graph_changed()
    return Experts(opened)


def _opened(program: Program, layer: ExpertLayer) -> ExpertLayer:
    if layer.dispatch is Dispatch.OFFSETS:
        open_stacks(program, layer)
        return layer
    if layer.capacity:
        return open_slot_branches(program, layer) if layer.tips else open_slots(program, layer)
    return open_branches(program, layer) if layer.tips else open_pairs(program, layer)


def _check_sizes(program: Program, layer: ExpertLayer, mesh: Sizes) -> None:
    if layer.num_experts % mesh.ep:
        raise PlanError(
            f"{layer.num_experts} experts are not divisible by ep = {mesh.ep}",
            where="mesh.ep",
            fix=f"choose ep from {{{', '.join(map(str, _divisors(layer.num_experts)))}}}",
        )
    for weight in layer.weights:
        width = weight.shape[weight.width] if weight.style else mesh.etp
        if width % mesh.etp:
            name = program.parameters[weight.nodes[0]]
            raise PlanError(
                f"{name} {list(weight.shape)}: the experts' width {width} is not divisible by etp = {mesh.etp}",
                where="mesh.etp",
                fix=f"choose etp from {{{', '.join(map(str, _divisors(width)[:8]))}}}; the default is tp",
            )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _not_understood(doubt: Doubt) -> PlanError:
    return PlanError(
        f"an apparent expert layer is not recognized, so that ep cannot distribute it: {doubt.why}",
        where=doubt.where,
        fix="set ep: 1 and remove etp, or weight and sum the results of each expert for the tokens that chose it",
    )
