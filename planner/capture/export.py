"""Capture: an unmodified nn.Module becomes one flat ATen graph at microbatch shape, by torch.export.

Exports the caller's module itself, never a copy: its parameters and buffers are exchanged for fake ones (shapes without
memory, capture.model.exchange) while its forward is traced, and restored. So capture costs no memory for a model of any
size, and closures, patched forwards and hooks of the original are captured too.

Leaves:  a graph of canonical ATen ops (capture.canonical.form) with parameters, buffers, constants and batch tensors as
         placeholders; ``meta["val"]`` with static shapes, ``meta["grad"]`` and the user's source line on every node.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export.graph_signature import InputKind, OutputKind

from passes.canonical.certain_draws import CertainDraws
from passes.canonical.decompose import HasRule
from passes.canonical.form import canonicalize, prune
from passes.canonical.side_calls import order_side_calls
from passes.errors import PlanError, Where, first_line, message_of
from passes.program.assumptions import Assumption
from passes.program.ops.recorded import calls_recorded
from passes.program.program import Program
from passes.program.source_lines import where_of
from planner.capture.buffer_writes import notes_of_writes
from planner.capture.data_dependence import (
    FIX,
    NUMBER_OF_DATA,
    depends_on_data,
    refuse_dynamic_shapes,
    refuse_numbers_from_tensors,
)
from planner.capture.functional import UnknownWrite, is_write, make_functional
from planner.capture.gradients.autocast import write_casts
from planner.capture.gradients.call_sites import CallSites
from planner.capture.gradients.hooks import refuse_gradient_hooks
from planner.capture.gradients.parameter_writes import refuse_parameter_writes
from planner.capture.gradients.python_side import PythonGradients
from planner.capture.gradients.reached import keep_what_is_reached
from planner.capture.model.caches import caches_off
from planner.capture.model.exchange import Exchange, fake, refuse_shared_memory
from planner.capture.model.held_tensors import Held, held_tensors, put_in_place, refuse_unknown_values
from planner.capture.model.sliced_lists import name_sliced_modules
from planner.capture.outputs import find_loss, select_outputs
from planner.capture.own_loss.lines import loss_lines
from planner.capture.python.eager_answers import EagerAnswers
from planner.capture.python.watch import ForwardWatch
from planner.capture.real_forward import refuse_another_forward
from planner.capture.same_forward import refuse_other_constants
from planner.capture.selection.assumed import Assumptions
from planner.capture.selection.dense import is_dynamic
from planner.capture.selection.questions import OTHER_ANSWERS, Questions
from planner.capture.selection.settle import compute_all_rows, skipped_parameters
from planner.slow_steps import see_one

FORWARD_MUST_WORK = (
    "call the model's forward with one microbatch of these inputs: it must also work on tensors without values (no "
    "numpy, no lists of elements)"
)


@calls_recorded()
def capture(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    has_rule: HasRule,
    loss: str = "auto",
    dtype: torch.dtype | None = None,
    is_known: bool = False,
) -> Program:
    """Export ``model(**inputs)`` (one microbatch) and bring it into canonical form.

    ``has_rule``: whether an op has a rule; others are written out if that helps. ``dtype`` casts
    floating parameters, buffers and inputs (None keeps the model's own). ``is_known``: for a model that was captured at
    another batch size before, when its Python side was checked: exported once, for its graph alone.

    Raises PlanError if the model cannot be traced or would not train as traced, naming the user's line, and if no
    output is a loss.
    """
    refuse_gradient_hooks(model)
    refuse_shared_memory(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    exchange = Exchange(model, dtype, mode)
    answers = EagerAnswers(model, exchange)
    while True:
        try:
            with answers.given():
                program = _captured(
                    model, inputs, mode, exchange, has_rule=has_rule, loss=loss, dtype=dtype, is_known=is_known
                )
        except PlanError as error:
            cannot_be_traced = depends_on_data(error) or error.fix == FORWARD_MUST_WORK
            if not cannot_be_traced or not answers.give_in(error.where):
                raise
        else:
            program.notes += answers.notes
            program.traced = list(answers.traced.values())
            if dtype is None and not is_known:
                refuse_another_forward(model, inputs, program)
            return program


def _captured(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
    exchange: Exchange,
    *,
    has_rule: HasRule,
    loss: str,
    dtype: torch.dtype | None,
    is_known: bool,
) -> Program:
    # a tensor of its own for each input: one tensor given twice would be captured as one input
    kwargs = {name: fake(tensor, dtype, mode) for name, tensor in inputs.items()}
    with exchange.made(), caches_off(model):
        traced = _traced(model, kwargs, exchange, mode, is_known=is_known)
        exported = traced.exported
        lifted = {
            s.target: exported.constants.get(s.target)
            for s in exported.graph_signature.input_specs
            if s.kind is InputKind.CONSTANT_TENSOR and s.target
        }
        held = held_tensors(lifted, model, exchange, lambda name: _reader_of(exported, name))
        constants = {name: _constant(value, exchange) for name, value in exported.constants.items() if name not in held}
        exported, written = _functional(exported, held)
        others = [(asked, _functional(other, held)[0].graph_module) for asked, other in traced.others]
        refuse_other_constants(exported, [other for _, other in traced.others])
        skipped = skipped_parameters(exported.graph_module, others[:1])  # the first assumes that no mask selects
        traced.told.extend(compute_all_rows(exported.graph_module, traced.asked, others))
    program = _program(model, exported, constants, held, loss, traced.notes, written, has_rule)
    program.rewrites.extend(traced.told)
    program.assumptions = traced.assumptions
    program.skipped = frozenset(fqn for name, fqn in program.parameters.items() if name in skipped)
    return program


@dataclass
class _Traced:
    """An export, notes for the user, the rewrites; and exports with other answers to the questions ``asked``."""

    exported: torch.export.ExportedProgram
    notes: list[str]
    told: list[tuple[str, Where]]
    asked: Questions
    others: list[tuple[Questions, torch.export.ExportedProgram]]
    assumptions: list[Assumption] = field(default_factory=list)


def _traced(
    model: nn.Module, kwargs: dict[str, torch.Tensor], exchange: Exchange, mode: FakeTensorMode, *, is_known: bool
) -> _Traced:
    """The export in which no check of values raises."""
    assumed = Assumptions()

    def trial() -> None:
        watch = ForwardWatch(model, exchange, mode)
        with watch.installed(), PythonGradients(model).watched():
            _export(model, kwargs, watch, Questions(CallSites(model), assumed))

    traced = assumed.settled(lambda: _attempted(model, kwargs, exchange, mode, assumed, is_known), trial)
    traced.assumptions = assumed.found(traced.exported.graph_signature.user_inputs)  # pyright: ignore
    return traced


def _attempted(
    model: nn.Module,
    kwargs: dict[str, torch.Tensor],
    exchange: Exchange,
    mode: FakeTensorMode,
    assumed: Assumptions,
    is_known: bool,
) -> _Traced:
    """The export; made twice if the forward left state that a next one may read, or asked a question that only data
    answers. If the model ``is_known``, made once.
    """
    sites = CallSites(model)
    watch, gradients, asked = ForwardWatch(model, exchange, mode), PythonGradients(model), Questions(sites, assumed)
    others: list[tuple[Questions, torch.export.ExportedProgram]] = []
    with watch.installed():
        with gradients.watched():
            exported = _export(model, kwargs, watch, asked)
        if is_known:
            return _Traced(exported, [], [], asked, [])
        with PythonGradients(model, gradients).watched():
            _quietly(lambda: watch.refuse_draws(kwargs))
            _quietly(lambda: watch.call_again(kwargs))
            if watch.is_unknown:
                watch.settle_unknown(exported, lambda: _export(model, kwargs, watch, Questions(sites, assumed)))
        for answer in OTHER_ANSWERS if asked.asked else ():
            with watch.as_before(), PythonGradients(model, gradients).watched():
                others.append((again := Questions(sites, assumed, answer), _export(model, kwargs, watch, again)))
        if watch.doubts:
            with watch.moved_on(), PythonGradients(model, gradients).watched():
                watch.settle(exported, lambda: _export(model, kwargs, watch, Questions(sites, assumed)))
        watch.refuse_changing()
        with PythonGradients(model, gradients).watched():
            _quietly(lambda: watch.refuse_schedules(kwargs))
    return _Traced(exported, [*gradients.notes, *watch.notes], list(gradients.regions.told()), asked, others)


def _constant(value: Any, exchange: Exchange) -> Any:
    """The value of a lifted constant; one of the model's on meta has none."""
    owner = exchange.original(value) if isinstance(value, torch.Tensor) else None
    if owner is not None and isinstance(value, FakeTensor) and exchange.values(owner).is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _reader_of(exported: torch.export.ExportedProgram, constant: str) -> Where:
    """The line at which the forward reads a lifted constant."""
    for spec in exported.graph_signature.input_specs:
        if spec.target == constant:
            holder = next(n for n in exported.graph.nodes if n.name == spec.arg.name)
            return where_of(next(iter(holder.users), holder))
    return Where()


def _functional(
    exported: torch.export.ExportedProgram, held: Mapping[str, Held]
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Without ops that write into their arguments, and without regions of vmap; and the placeholders written to, with
    the nodes of their last values."""
    module = exported.graph_module
    if _any_call(module, is_write) or is_dynamic(module):
        signature = exported.graph_signature
        parameters = dict(signature.inputs_to_parameters)
        parameters |= {s.arg.name: held[s.target or ""].fqn for s in signature.input_specs if s.target in held}
        refuse_parameter_writes(module, parameters)
        if not _any_call(module, _is_of_vmap):
            with contextlib.suppress(UnknownWrite):
                return exported, make_functional(module)
    if _any_call(module, lambda call: is_write(call) or _is_of_vmap(call)):
        exported = _decomposed(exported)
    holders = {s.target: s.arg.name for s in exported.graph_signature.input_specs if s.target}
    return exported, {
        holders[s.target]: s.arg.name
        for s in exported.graph_signature.output_specs
        if s.kind is OutputKind.BUFFER_MUTATION and s.target in holders
    }


def _decomposed(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    try:
        return _quietly(lambda: exported.run_decompositions({}))
    except Exception as error:
        raise PlanError(
            f"the model cannot be captured: its in-place ops cannot be made functional: {error}",
            fix="write them out of place (`x = x + y` for `x += y`)",
        ) from error


def _export(
    model: nn.Module, kwargs: dict[str, torch.Tensor], watch: ForwardWatch, asked: Questions
) -> torch.export.ExportedProgram:
    def check(args: Any, kwargs: Any) -> None:
        see_one("ops")
        watch.check(args, kwargs)

    try:
        with CertainDraws(check, asked.draw_is_not_zero), asked.answered(), loss_lines(model):
            exported = _quietly(lambda: torch.export.export(model, (), kwargs, strict=False))
        write_casts(exported.graph_module)
        name_sliced_modules(exported.graph_module, model)
        return exported
    except (PlanError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of the user's forward: it may derive from any class
        where = CallSites(model).of(error)
        if isinstance(error, TypeError) and where.file.endswith("inspect.py"):
            raise PlanError(
                f"the model does not accept these inputs: {error}",
                where="inputs",
                fix="name the keys under `inputs` as the arguments of the model's forward",
            ) from error
        text = message_of(error).strip()
        what = text.splitlines()[0] if text and isinstance(error, Exception) else first_line(error)
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            op = what.removesuffix(".default").removesuffix(".Tensor")
            what = f"the result of {op} depends on the values of tensors"
            raise PlanError(f"the model cannot be captured: {what} (data-dependent)", where=where, fix=FIX) from error
        if "data-dependent" in what or "SymInt" in what or "SymFloat" in what:
            raise PlanError(f"the model cannot be captured: {NUMBER_OF_DATA}", where=where, fix=FIX) from error
        raise PlanError(f"the model cannot be captured: {what}", where=where, fix=FORWARD_MUST_WORK) from error


def _quietly(run: Any) -> Any:
    """torch.export warns, logs and prints half graphs, transformers gives advice: none of it concerns a plan."""
    levels = [(logger, logger.level) for logger in map(logging.getLogger, ("torch", "transformers"))]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return run()
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def _any_call(graph_module: fx.GraphModule, is_such: Callable[[fx.Node], bool]) -> bool:
    """Whether any call of the graph or of a region in it is such; only then the (costly) functionalisation runs."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any(node.op == "call_function" and is_such(node) for graph in graphs for node in graph.nodes)


def _is_of_vmap(call: fx.Node) -> bool:
    """Whether the call begins or ends torch.vmap; in between, the export recorded ops on single rows."""
    return "vmap" in getattr(call.target, "__name__", "")


def _program(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    constants: Mapping[str, Any],
    held: Mapping[str, Held],
    loss: str,
    notes: list[str],
    written: Mapping[str, str],
    has_rule: HasRule,
) -> Program:
    fqns, aliases = _parameter_names(model)
    program = Program(exported.graph_module, {}, aliases, {}, {}, {}, {}, "", notes)
    in_place: dict[str, Held] = {}
    for spec in exported.graph_signature.input_specs:
        name, target = spec.arg.name, spec.target or ""
        if spec.kind is InputKind.PARAMETER:
            program.parameters[name] = fqns[target]
        elif spec.kind is InputKind.BUFFER:
            program.buffers[name] = target
        elif spec.kind is InputKind.USER_INPUT:
            program.inputs[name] = name
        elif target in held:
            in_place[name] = held[target]
        else:
            program.constants[name] = constants.get(target, torch.empty(0))
    refuse_dynamic_shapes(exported.graph_module)
    outputs = select_outputs(exported)
    names = {
        s.arg.name: s.target or ""
        for s in exported.graph_signature.input_specs
        if s.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    }
    fixed = {*program.buffers, *program.constants}
    program.notes += notes_of_writes(exported.graph_module.graph, written, names, fixed, list(outputs.values()))
    put_in_place(exported.graph_module, in_place, {f: n for n, f in (program.buffers | program.parameters).items()})
    program.graph = canonicalize(exported.graph_module, outputs, program.constants, in_place, has_rule=has_rule)
    # an input that is named like a function of Python (`input`, `next`) has another name in a graph
    holders = program.graph.graph.find_nodes(op="placeholder")
    program.inputs = {node.name: str(node.target) for node in holders if node.target in program.inputs}
    order_side_calls(program.graph.graph, program.parameters)
    _merge_tied(program)
    program.outputs = {name: position for position, name in enumerate(outputs)}
    program.loss = find_loss(program, loss)
    _keep_only_the_loss(program)
    refuse_unknown_values(program.graph.graph, program.constants)
    for name, fqn in program.parameters.items():
        program.node(name).meta["parameter"] = fqn
    keep_what_is_reached(program)
    return program


def _merge_tied(program: Program) -> None:
    """One placeholder for a tied parameter, whichever of its names the forward went through."""
    first: dict[str, fx.Node] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        fqn = program.parameters.get(node.name)
        kept = first.setdefault(fqn, node) if fqn else node
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.graph.erase_node(node)
            del program.parameters[node.name]


def _keep_only_the_loss(program: Program) -> None:
    """Training reads no other output: calls that only feed logits or hidden states for the caller are dropped."""
    output = program.graph.graph.output_node()
    name = next(n for n, position in program.outputs.items() if output.args[0][position].name == program.loss)  # pyright: ignore
    output.args = ((program.node(program.loss),),)
    program.outputs = {name: 0}
    prune(program.graph)
    refuse_numbers_from_tensors(program.graph)


def _parameter_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Every dotted name → the first name of the same tensor, and the aliases alone."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[fqn] = first.setdefault(id(parameter), fqn)
    return names, {fqn: name for fqn, name in names.items() if fqn != name}
