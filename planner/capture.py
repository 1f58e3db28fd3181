"""Capture: an unmodified nn.Module becomes one flat ATen graph at microbatch shape, by torch.export.

The caller's module is never touched: what is exported is a structural copy whose parameters, buffers and tensor
attributes are fake (shapes without memory), so capture costs no memory whatever the size of the model.

Leaves:  a graph of canonical ATen ops (planner.canonical.form) with parameters, buffers, constants and batch tensors as
         placeholders; ``meta["val"]`` with static shapes, ``meta["grad"]`` and the user's source line on every node.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from planner.canonical.form import canonicalize, prune
from planner.certain_draws import CertainDraws
from planner.data_dependence import FIX, refuse_dynamic_shapes, refuse_numbers_from_tensors
from planner.errors import PlanError
from planner.gradients.call_sites import CallSites
from planner.gradients.functions import check_custom_gradients
from planner.gradients.hooks import refuse_gradient_hooks
from planner.gradients.parameter_writes import refuse_parameter_writes
from planner.gradients.python_side import PythonGradients
from planner.outputs import find_loss, return_plain_structures, select_outputs
from planner.program import Program

FORWARD_MUST_WORK = (
    "call the model's forward with one microbatch of these inputs: it must work, also on tensors that "
    "have shapes but no values (no numpy, no lists of their elements)"
)


def capture(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], *, loss: str = "auto", dtype: torch.dtype | None = None
) -> Program:
    """Export ``model(**inputs)`` (one microbatch) and bring it into canonical form.

    ``dtype`` casts floating parameters, buffers and inputs (None keeps the model's own). Raises PlanError where the
    model cannot be traced, naming the user's line, and where no output is a loss.
    """
    refuse_gradient_hooks(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _fake_twin(model, dtype, mode)
    return_plain_structures(twin)
    # a tensor of its own for each input: one tensor given twice would be captured as one input
    kwargs = {name: _fake(tensor, dtype, mode) for name, tensor in inputs.items()}
    watch = PythonGradients(twin)
    with watch.watched():
        exported = _export(twin, kwargs)
    notes = [*watch.notes, *check_custom_gradients(watch.applications, mode)]
    if _any_call(exported.graph_module, _mutates):
        refuse_parameter_writes(exported.graph_module, exported.graph_signature.inputs_to_parameters)
    if _any_call(exported.graph_module, lambda call: _mutates(call) or _is_of_vmap(call)):
        exported = _quietly(lambda: exported.run_decompositions({}))
    return _program(model, twin, exported, loss, notes)


def _fake_twin(model: nn.Module, dtype: torch.dtype | None, mode: FakeTensorMode) -> nn.Module:
    """A copy of the module tree whose tensors have shapes but no memory; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        empty = _fake(tensor, dtype, mode)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise PlanError(
            f"the model cannot be copied for capture: {error}",
            where=type(model).__name__,
            fix="keep locks, files and process handles out of the module's attributes",
        ) from error
    for module in copied.modules():
        switch_off_caches(module)
    return copied


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None, mode: FakeTensorMode) -> torch.Tensor:
    """A new tensor of this shape. On the CPU, not on meta: constants that a forward makes keep their values."""
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device="cpu")


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (v for v in vars(module).values() if isinstance(v, torch.Tensor))


def switch_off_caches(module: nn.Module) -> None:
    """A key-value cache and recomputation wrappers are of no use in a traced training step (the copy alone changes)."""
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "use_cache", None):
        config.use_cache = False
    if getattr(module, "gradient_checkpointing", None) is True:
        module.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]


def _export(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> torch.export.ExportedProgram:
    try:
        with CertainDraws():
            return _quietly(lambda: torch.export.export(model, (), kwargs, strict=False))
    except PlanError:
        raise
    except Exception as error:
        where = CallSites(model).of(error)
        if isinstance(error, TypeError) and where.file.endswith("inspect.py"):
            raise PlanError(
                f"the model does not take these inputs: {error}",
                where="inputs",
                fix="name the keys under `inputs` as the arguments of the model's forward",
            ) from error
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PlanError(
            f"the model cannot be captured: {what}",
            where=where,
            fix=FIX if "data-dependent" in what else FORWARD_MUST_WORK,
        ) from error


def _quietly(run: Any) -> Any:
    """torch.export warns, logs and prints half graphs: no concern of a user who only plans."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return run()
    finally:
        logger.setLevel(level)


def _any_call(graph_module: fx.GraphModule, is_such: Callable[[fx.Node], bool]) -> bool:
    """Whether any call of the graph or of a region in it is such; only then the (costly) functionalisation runs."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any(node.op == "call_function" and is_such(node) for graph in graphs for node in graph.nodes)


def _mutates(call: fx.Node) -> bool:
    """Whether the op writes into an argument."""
    schema = getattr(call.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_of_vmap(call: fx.Node) -> bool:
    """Where torch.vmap begins and ends; between, the export recorded ops on single rows."""
    return "vmap" in getattr(call.target, "__name__", "")


def _program(model: nn.Module, twin: nn.Module, exported: torch.export.ExportedProgram, loss: str,
             notes: list[str]) -> Program:
    fqns, aliases = _parameter_names(model, twin)
    program = Program(exported.graph_module, {}, aliases, {}, {}, {}, {}, "", notes)
    constants = _constant_values(model, exported)
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.PARAMETER:
            program.parameters[name] = fqns[spec.target or ""]
        elif spec.kind is InputKind.BUFFER:
            program.buffers[name] = spec.target or ""
        elif spec.kind is InputKind.USER_INPUT:
            program.inputs[name] = name
        else:
            program.constants[name] = constants.get(spec.target or "", torch.empty(0))
    refuse_dynamic_shapes(exported.graph_module)
    outputs = select_outputs(exported, program)
    program.graph = canonicalize(exported.graph_module, outputs, program.constants)
    _merge_tied(program)
    program.outputs = {name: position for position, name in enumerate(outputs)}
    program.loss = find_loss(program, loss)
    _keep_only_the_loss(program)
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
    """Training reads no other output: what only feeds logits or hidden states for the caller is dropped."""
    output = program.graph.graph.output_node()
    name = next(n for n, position in program.outputs.items() if output.args[0][position].name == program.loss)  # pyright: ignore
    output.args = ((program.node(program.loss),),)
    program.outputs = {name: 0}
    prune(program.graph)
    refuse_numbers_from_tensors(program.graph)


def _parameter_names(model: nn.Module, twin: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Every dotted name → the first name of the same tensor, and the aliases alone."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[fqn] = first.setdefault(id(parameter), fqn)
    return names, {fqn: name for fqn, name in names.items() if fqn != name}


def _constant_values(model: nn.Module, exported: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Lifted constants by name; one that is a tensor attribute of the user's module takes its real value there."""
    values = {}
    for name, value in exported.constants.items():
        if not isinstance(value, torch.Tensor):
            continue
        path, _, attribute = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            value = getattr(model.get_submodule(path), attribute)
        values[name] = value
    return values
