"""Capture: an unmodified nn.Module becomes one flat ATen graph at microbatch shape, by torch.export.

The caller's module is never touched: what is exported is a structural copy whose parameters, buffers and tensor
attributes are fake (shapes without memory), so capture costs no memory whatever the size of the model.

Leaves:  a graph of canonical ATen ops (planner.canonical) with parameters, buffers, constants and batch tensors as
         placeholders; ``meta["val"]`` with static shapes, ``meta["grad"]`` and the user's source line on every node.
"""

from __future__ import annotations

import contextlib
import copy
import io
import linecache
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from planner.canonical import canonicalize, prune
from planner.certain_draws import CertainDraws
from planner.data_dependence import FIX, refuse_dynamic_shapes, refuse_numbers_from_tensors
from planner.errors import PlanError, Where
from planner.source_lines import is_foreign_frame

FORWARD_MUST_WORK = (
    "call the model's forward with one microbatch of these inputs: it must work, also on tensors that "
    "have shapes but no values (no numpy, no lists of their elements)"
)


@dataclass
class Program:
    """A captured model. Names on the right are the user's own; placeholder names on the left are the graph's."""

    graph: fx.GraphModule
    parameters: dict[str, str]
    aliases: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, str]
    outputs: dict[str, int]
    loss: str
    notes: list[str] = field(default_factory=list)
    rewrites: list[tuple[str, Where]] = field(default_factory=list)  # what was simplified, and where in the user's code

    def node(self, name: str) -> fx.Node:
        return self._index()[name]

    def _index(self) -> dict[str, fx.Node]:
        index = self.__dict__.get("_nodes")
        if index is None or len(index) != len(self.graph.graph.nodes):
            index = self.__dict__["_nodes"] = {n.name: n for n in self.graph.graph.nodes}
        return index


def capture(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], *, loss: str = "auto", dtype: torch.dtype | None = None
) -> Program:
    """Export ``model(**inputs)`` (one microbatch) and bring it into canonical form.

    ``dtype`` casts floating parameters, buffers and inputs (None keeps the model's own). Raises PlanError where the
    model cannot be traced, naming the user's line, and where no output is a loss.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = _fake_twin(model, dtype, mode)
    # a tensor of its own for each input: one tensor given twice would be captured as one input
    kwargs = {name: _fake(tensor, dtype, mode) for name, tensor in inputs.items()}
    exported = _export(twin, kwargs)
    if _mutates(exported.graph_module):
        exported = _quietly(lambda: exported.run_decompositions({}))
    return _program(model, twin, exported, loss)


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
        _switch_off_caches(module)
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


def _switch_off_caches(module: nn.Module) -> None:
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
    except Exception as error:
        where = _user_frame(error, model)
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


def _user_frame(error: BaseException, model: nn.Module) -> Where:
    """The deepest frame of the traceback that is not PyTorch's own, and the dotted name of the module that it is in."""
    steps = list(traceback.walk_tb(error.__traceback__))
    users = [(f, line) for f, line in steps if not is_foreign_frame(f.f_code.co_filename)]
    if not users:
        return Where()
    names = {id(module): name for name, module in model.named_modules()}
    holders = [names.get(id(f.f_locals.get("self"))) for f, _ in users]
    frame, line = users[-1]
    file = frame.f_code.co_filename
    return Where(
        next((h for h in reversed(holders) if h is not None), ""), file, line, linecache.getline(file, line).strip()
    )


def _mutates(graph_module: fx.GraphModule) -> bool:
    """Whether any op writes into an argument; only then the (costly) functionalisation runs."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                schema = getattr(node.target, "_schema", None)
                if node.op == "call_function" and schema is not None and schema.is_mutable:
                    return True
    return False


def _program(model: nn.Module, twin: nn.Module, exported: torch.export.ExportedProgram, loss: str) -> Program:
    fqns, aliases = _parameter_names(model, twin)
    program = Program(exported.graph_module, {}, aliases, {}, {}, {}, {}, "")
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
    outputs = _select_outputs(exported, program)
    program.graph = canonicalize(exported.graph_module, outputs, program.constants)
    _merge_tied(program)
    program.outputs = {name: position for position, name in enumerate(outputs)}
    program.loss = _find_loss(program, loss)
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


def _select_outputs(exported: torch.export.ExportedProgram, program: Program) -> dict[str, str]:
    """Output name → node name, for the tensor outputs of the user's forward."""
    specs = [s for s in exported.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    paths = _output_paths(exported, len(specs))
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            program.notes.append(f"the forward updates buffer {spec.target}: the update is not carried out")
    return {
        path: spec.arg.name
        for path, spec in zip(paths, specs, strict=True)
        if type(spec.arg).__name__ == "TensorArgument"
    }


def _output_paths(exported: torch.export.ExportedProgram, count: int) -> list[str]:
    """Names such as ``loss`` or ``0`` for the leaves of the output structure."""
    spec: Any = exported.call_spec.out_spec
    dummy = pytree.tree_unflatten(list(range(count)), spec)
    paths, _ = pytree.tree_flatten_with_path(dummy)
    by_leaf = {leaf: ".".join(_key(k) for k in path) or "output" for path, leaf in paths if leaf is not None}
    return [by_leaf[i] for i in range(count)]


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _find_loss(program: Program, wanted: str) -> str:
    """The name of the loss node: the named output, else ``loss``, else the only scalar with a gradient."""
    leaves = program.graph.graph.output_node().args[0]
    assert isinstance(leaves, (tuple, list))
    nodes: dict[str, Any] = {name: leaves[position] for name, position in program.outputs.items()}
    listed = ", ".join(f"{name} {list(n.meta['val'].shape)}" for name, n in nodes.items()) or "none"
    scalars = {k: n for k, n in nodes.items() if n.meta["val"].numel() == 1 and n.meta["grad"]}
    if wanted != "auto":
        if wanted not in scalars:
            raise PlanError(
                f"the model has no scalar output `{wanted}` with a gradient (outputs: {listed})",
                where="loss",
                fix="name one of the outputs that is a scalar loss",
            )
        return scalars[wanted].name
    if "loss" in scalars:
        return scalars["loss"].name
    if len(scalars) == 1:
        return next(iter(scalars.values())).name
    if not scalars:
        raise PlanError(
            f"no output of the model is a loss (outputs: {listed})",
            where="loss",
            fix="return a scalar loss from forward; a Hugging Face model needs `labels` among its inputs",
        )
    raise PlanError(
        f"several outputs could be the loss: {', '.join(scalars)}", where="loss", fix="set loss: {output: <name>}"
    )
