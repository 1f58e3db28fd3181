"""Capture: an unmodified nn.Module becomes one flat ATen graph at microbatch shape, by torch.export.

Exports the caller's module itself, never a copy: its parameters and buffers are exchanged for fake ones (shapes without
memory, planner.capture.model.exchange) while its forward is traced, and restored. So capture costs no memory for a
model of any size, and closures, patched forwards and hooks of the original are captured too.

Leaves:  a graph of canonical ATen ops (passes.canonical.form) with parameters, buffers, constants and batch tensors as
         placeholders; ``meta["val"]`` with static shapes, ``meta["grad"]`` and the user's source line on every node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from passes.canonical.form import canonicalize
from passes.canonical.side_calls import order_side_calls
from passes.errors import PlanError, Where, refusing
from passes.partition.typings.table import has_rule
from passes.program.builder import prune
from passes.program.ops.own_backward import calls_recorded
from passes.program.program import Program
from planner.capture.data_dependence import (
    calls_in,
    depends_on_data,
    refuse_dynamic_shapes,
    refuse_numbers_from_tensors,
)
from planner.capture.eager_trials import agrees_on_both_sides, refuse_another_forward
from planner.capture.functional import UnknownWrite, is_write, make_functional
from planner.capture.gradients.parameters import (
    notes_of_writes,
    refuse_gradient_hooks,
    refuse_parameter_writes,
)
from planner.capture.graphs_equal import comes_to_rest, fixed_tensors, refuse_other_constants
from planner.capture.memory_order import views_for_memory
from planner.capture.model.eager import NOTE, caches_off, in_eager_mode, was_compiled
from planner.capture.model.exchange import (
    Exchange,
    fake,
    has_values,
    refuse_parameters,
    refuse_shared_memory,
)
from planner.capture.model.held_tensors import (
    HeldTensor,
    held_tensors,
    put_in_place,
    read_kept_values,
    refuse_unknown_values,
)
from planner.capture.outputs import find_loss, keep_what_is_reached, select_outputs
from planner.capture.own_loss import model_of
from planner.capture.python.eager_answers import EagerAnswers
from planner.capture.resized import Earlier
from planner.capture.selection.places import is_dynamic
from planner.capture.selection.settle import compute_all_rows, skipped_parameters
from planner.capture.trace import FORWARD_MUST_WORK, Forward, quietness, traced


@calls_recorded()
def capture(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    loss: str = "auto",
    dtype: torch.dtype | None = None,
    is_known: bool = False,
    earlier: Earlier | None = None,
) -> Program:
    """Export ``model(**inputs)`` (one microbatch) and return it in canonical form.

    Ops without a rule are written out if that helps. ``dtype`` casts floating-point parameters, buffers and inputs
    (None keeps the model's own). ``is_known``: the Python side of the model was checked in a capture at another batch
    size, so that only the graph is needed. ``earlier``: captures at other sizes; if possible, this one is derived from
    the first, without an export.

    Raises PlanError if the model cannot be traced or would not train as traced, with the source line, and if no output
    is a loss.
    """
    refuse_gradient_hooks(model)
    refuse_parameters(model)
    refuse_shared_memory(model)
    with in_eager_mode() as compiled:
        program = _as_in_eager_mode(_Asked(model, inputs, loss, dtype, is_known, earlier or Earlier()))
    if compiled or was_compiled(model_of(model)):
        program.rewrites.append((NOTE, Where()))
    return program


@dataclass(frozen=True)
class _Asked:
    """The arguments of a capture."""

    model: nn.Module
    inputs: Mapping[str, torch.Tensor]
    loss: str
    dtype: torch.dtype | None
    is_known: bool
    earlier: Earlier


def _as_in_eager_mode(asked: _Asked) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    exchange = Exchange(asked.model, asked.dtype, mode)
    answers = EagerAnswers(asked.model, exchange, asked.earlier.traced)
    while True:
        try:
            with answers.given():
                program = _captured(asked, mode, exchange)
        except PlanError as error:
            cannot_be_traced = depends_on_data(error) or error.fix == FORWARD_MUST_WORK
            if not cannot_be_traced or not answers.give_in(error.where):
                raise
        else:
            program.traced = list(answers.traced.values())
            is_checked = asked.dtype is None and not asked.is_known
            is_same = is_checked and refuse_another_forward(asked.model, asked.inputs, program)
            is_doubtful = bool(answers.notes) and not is_same and not asked.is_known
            if is_doubtful and not agrees_on_both_sides(asked.model, asked.inputs, program):
                program.notes += answers.notes
            return program


def _captured(asked: _Asked, mode: FakeTensorMode, exchange: Exchange) -> Program:
    model, earlier = asked.model, asked.earlier
    # a tensor of its own for each input: one tensor given twice would be captured as one input
    kwargs = {name: fake(tensor, asked.dtype, mode) for name, tensor in asked.inputs.items()}
    with exchange.made(), caches_off(model):
        made = traced(Forward(model, kwargs, exchange, mode), earlier, is_known=asked.is_known)
        exported = made.exported
        if made.gradient is not None:
            for one in (exported, *(other for _, other in made.others)):
                read_kept_values(one)
        held = held_tensors(exported, model, exchange)
        constants = {name: _constant(value, exchange) for name, value in exported.constants.items() if name not in held}
        exported, written = _functional(exported, held)
        if earlier.first is None and exported is made.exported:
            earlier.first = made.first
        others = [(number, _functional(other, held)[0].graph_module) for number, other in made.others]
        refuse_other_constants(exported, [other for _, other in made.others])
        first = _parameter_names(model)[0]
        signature = exported.graph_signature
        lifted = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        values = {name: v for name, target in lifted.items() if has_values(v := constants.get(target))}
        fqn_of = {name: first[target] for name, target in signature.inputs_to_parameters.items()}
        skipped = skipped_parameters(exported.graph_module, others[:1], fqn_of)  # the first assumes empty masks
        inputs: Any = signature.user_inputs
        told, checks = compute_all_rows(exported.graph_module, made.asked, others, values, inputs)
        made.told.extend(told)
    program = _program(asked, exported, constants, held, made.notes, written)
    refuse_unknown_values(program.graph.graph, program.constants, made.gradient)
    program.rewrites.extend(made.told)
    program.assumptions = [*made.assumptions, *checks]
    program.widens = made.widens
    program.skipped = skipped & frozenset(program.parameters.values())
    return program


def _constant(value: Any, exchange: Exchange) -> Any:
    """Return the value of a lifted constant, without memory if the model's tensor is on meta."""
    owner = exchange.original(value) if isinstance(value, torch.Tensor) else None
    if owner is not None and isinstance(value, FakeTensor) and exchange.values(owner).is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _functional(
    exported: torch.export.ExportedProgram, held: Mapping[str, HeldTensor]
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Remove ops that write into their arguments, and vmap. Return the export, and the last value of each placeholder
    that it wrote to, by name.
    """
    module = exported.graph_module
    views_for_memory(module)
    where, signature = Where(), exported.graph_signature
    if any(map(is_write, calls_in(module))) or is_dynamic(module):
        lifted = signature.inputs_to_lifted_tensor_constants
        of_held = {name: held[target].fqn for name, target in lifted.items() if target in held}
        refuse_parameter_writes(module, {**signature.inputs_to_parameters, **of_held})
        if not any(map(_is_of_vmap, calls_in(module))):
            try:
                return exported, make_functional(module)
            except UnknownWrite as unknown:
                where = unknown.where
    if any(is_write(call) or _is_of_vmap(call) for call in calls_in(module)):  # costly, so only then
        exported = _decomposed(exported, where)
    signature = exported.graph_signature
    written = {target: last for last, target in signature.buffers_to_mutate.items()}
    holders = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    return exported, {name: written[target] for name, target in holders.items() if target in written}


def _decomposed(exported: torch.export.ExportedProgram, where: Where) -> torch.export.ExportedProgram:
    what = "the model cannot be captured: its in-place ops cannot be made functional"
    fix = "write them out of place (`x = x + y` for `x += y`)"
    with refusing(what, where=where, fix=fix, of=(Exception,)), quietness():
        return exported.run_decompositions({})


def _is_of_vmap(call: fx.Node) -> bool:
    """Return whether the call begins or ends torch.vmap; in between, the export recorded ops on single rows."""
    return "vmap" in getattr(call.target, "__name__", "")


def _program(
    asked: _Asked,
    exported: torch.export.ExportedProgram,
    constants: Mapping[str, Any],
    held: Mapping[str, HeldTensor],
    notes: list[str],
    written: Mapping[str, str],
) -> Program:
    fqns, aliases = _parameter_names(asked.model)
    signature = exported.graph_signature
    program = Program(exported.graph_module, {}, aliases, {}, {}, {}, {}, "", notes)
    program.parameters = {name: fqns[target] for name, target in signature.inputs_to_parameters.items()}
    program.buffers = dict(signature.inputs_to_buffers)
    program.inputs = {str(name): str(name) for name in signature.user_inputs}
    lifted = {**signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_lifted_custom_objs}
    in_place = {name: held[target] for name, target in lifted.items() if target in held}
    program.constants = {n: constants.get(target, torch.empty(0)) for n, target in lifted.items() if n not in in_place}
    refuse_dynamic_shapes(exported.graph_module)
    outputs, names = select_outputs(exported), program.buffers | lifted
    fixed = {*program.buffers, *program.constants}
    program.notes += notes_of_writes(
        exported.graph_module.graph,
        written,
        names,
        fixed,
        list(outputs.values()),
        lambda read: comes_to_rest(exported, read, _fixed_values(asked)),
    )
    holders = exported.graph_module.graph.find_nodes(op="placeholder")
    unread = {n.name for n in holders if isinstance(program.constants.get(n.name), FakeTensor) and not n.users}
    program.constants = {name: value for name, value in program.constants.items() if name not in unread}
    put_in_place(exported.graph_module, in_place, {f: n for n, f in (program.buffers | program.parameters).items()})
    program.graph = canonicalize(
        exported.graph_module, outputs, program.constants, {*in_place, *unread}, has_rule=has_rule
    )
    # an input that is named like a function of Python (`input`, `next`) has another name in a graph
    holders = program.graph.graph.find_nodes(op="placeholder")
    program.inputs = {node.name: str(node.target) for node in holders if node.target in program.inputs}
    order_side_calls(program.graph.graph, program.parameters)
    _merge_tied(program)
    program.outputs = {name: position for position, name in enumerate(outputs)}
    program.loss = find_loss(program, asked.loss)
    _keep_only_the_loss(program)
    for name, fqn in program.parameters.items():
        program.node(name).meta["parameter"] = fqn
    for name in (*program.buffers, *program.constants):
        program.node(name).meta["known"] = True
    keep_what_is_reached(program)
    return program


def _fixed_values(asked: _Asked) -> dict[str, torch.Tensor]:
    """Return buffers and frozen parameters by dotted name, in the dtype of the capture."""
    fixed = fixed_tensors(asked.model)
    return {n: v.detach().to(asked.dtype if v.is_floating_point() else None) for n, v in fixed.items()}


def _merge_tied(program: Program) -> None:
    """Merge the placeholders of a tied parameter that the forward read under several names."""
    first: dict[str, fx.Node] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        fqn = program.parameters.get(node.name)
        kept = first.setdefault(fqn, node) if fqn else node
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.graph.erase_node(node)
            del program.parameters[node.name]


def _keep_only_the_loss(program: Program) -> None:
    """Drop all outputs but the loss, and the calls that only feed the others: training does not read them."""
    output = program.graph.graph.output_node()
    name = next(n for n, position in program.outputs.items() if output.args[0][position].name == program.loss)  # pyright: ignore
    output.args = ((program.node(program.loss),),)
    program.outputs = {name: 0}
    prune(program.graph.graph)
    refuse_numbers_from_tensors(program.graph)


def _parameter_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return every dotted name → the first name of the same tensor, and the aliases alone."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[fqn] = first.setdefault(id(parameter), fqn)
    return names, {fqn: name for fqn, name in names.items() if fqn != name}
