"""Do two captures compute the same? And does a capture compute what the model does?

Two captures: calls are compared, and values if a model keeps results.

    first call     freqs = outer(positions, inverse); self.cache[:n] = freqs; use(freqs)
    next call      use(self.cache[:n])                                          other calls, the same numbers

Values without a batch tensor or parameter as input are computed, with buffers as the previous call left them; the rest
is equal if the same ops are applied to the same operands, down to those values. Two graphs are equal if their results
are.

A capture and the model: a small model with weights is run once unchanged, and once as captured.

    eager loss        model(**batch), nothing replaced
    captured loss     the canonical graph on the same weights and the same batch

A forward can find out that it is traced in ways that no list knows (planner.capture.python.eager_answers holds those
known), and then compute something else. The two are compared if that is cheap, and the loss does not depend on random
numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import PlanError, Where
from passes.program.known_values import computed, follows
from passes.program.program import Program
from passes.program.source_lines import where_of
from planner.capture.functional import UnknownWrite, functional_graph
from planner.capture.model.eager import caches_off, in_eager_mode
from planner.capture.model.exchange import has_values, registry_kept, tensors_in
from planner.capture.outputs import plain_structure
from planner.capture.python.state import PythonState
from planner.capture.selection.space import Keys
from planner.capture.user_lines import CallSites

MOST_ELEMENTS = 1 << 24
CHEAP = 10**8  # elements of weights times elements of inputs
DEAR = 2 * 10**10  # if the capture had to take another path than eager mode
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_FIX = "compute the same with and without tracing: do not test for tracing or for classes of tensors"


def first_difference(first: ExportedProgram, second: ExportedProgram, buffers: Mapping[str, Tensor]) -> fx.Node | None:
    """The call of ``first`` with which ``second`` differs; None if both compute the same.

    ``buffers``: by dotted name, their values before the first call, and those of frozen parameters.
    """
    differing = _first_other_call(first.graph, second.graph) or _reader_of_another_constant(first, second)
    if differing is None:
        return None
    try:
        before = _Keys(first, buffers)
        after = _Keys(second, before.left)
    except UnknownWrite:
        return differing
    return None if before.output == after.output else differing


def refuse_other_constants(first: ExportedProgram, others: Iterable[ExportedProgram]) -> None:
    """Raise PlanError if another export of a forward reads another constant: Python computed it."""
    for other in others:
        reader = _reader_of_another_constant(first, other)
        if reader is not None:
            raise PlanError(
                "the model cannot be captured: a constant depends on a data-dependent selection",
                where=where_of(reader),
                fix="compute it with tensors, such as a mask and its sum, not with Python numbers",
            )


def _first_other_call(first: fx.Graph, second: fx.Graph) -> fx.Node | None:
    nodes, theirs = ([n for n in graph.nodes if n.op != "placeholder"] for graph in (first, second))
    for i, node in enumerate(nodes):
        if i >= len(theirs) or _words(node) != _words(theirs[i]):
            return node
    return nodes[-1] if len(theirs) > len(nodes) else None


def _reader_of_another_constant(first: ExportedProgram, second: ExportedProgram) -> fx.Node | None:
    """The same calls may read other constants: ``torch.tensor(self.calls)`` is one."""
    own, other = (_held_values(exported, {}) for exported in (first, second))
    for holder in first.graph.find_nodes(op="placeholder"):
        name = holder.name
        if name in own and (name not in other or fingerprint(own[name]) != fingerprint(other[name])):
            return next(iter(holder.users), holder)
    return None


def _words(node: fx.Node) -> tuple[str, ...]:
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs)


class _Keys(Keys):
    """Of one capture: known values have the key of their content. ``left``: buffers after the call, if known."""

    def __init__(self, exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        graph, written = functional_graph(exported.graph_module)
        self._held = _held_values(exported, buffers)
        self._names = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
        self.values: dict[fx.Node, Any] = {}
        *inner, output = graph.nodes
        for node in inner:
            self(node)
        self.output = str(fx.map_arg(output.args, self._named))
        nodes = {n.name: n for n in graph.nodes}
        self.left = dict(buffers)
        for holder, last in written.items():
            value = self.values.get(nodes[last])
            name = self._names.get(holder)
            if name in self.left and isinstance(value, Tensor):
                self.left[name] = value
            elif name is not None:
                self.left.pop(name, None)

    def _made(self, node: fx.Node) -> str:
        value = self._value(node)
        if value is not None:
            self.values[node] = value
        if isinstance(value, Tensor):
            return fingerprint(value)
        return f"{node.name} {self._names.get(node.name)}" if node.op == "placeholder" else super()._made(node)

    def _value(self, node: fx.Node) -> Any:
        """The value, if known: constants, buffers, and values made of them alone."""
        if node.op == "placeholder":
            return self._held.get(node.name)
        if not follows(node) or any(n not in self.values for n in node.all_input_nodes):
            return None
        expected = node.meta.get("val")
        too_large = isinstance(expected, Tensor) and expected.numel() > MOST_ELEMENTS
        if too_large:
            return None
        with suppress(RuntimeError):  # a buffer that the capture has cast: unknown, and named by its computation
            return computed(node, self.values.__getitem__)
        return None


def _held_values(exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Placeholder → value, of constants, buffers and frozen parameters that have one."""
    found: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        kept: Any = None
        if spec.kind in (InputKind.BUFFER, InputKind.PARAMETER):
            kept = buffers.get(spec.target or "")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            kept = exported.constants.get(spec.target or "")
        if has_values(kept):
            found[spec.arg.name] = kept.detach()
    return found


def fingerprint(value: Tensor) -> str:
    """Equal for tensors on the CPU of one dtype, shape and values."""
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


class Truths(TorchDispatchMode):
    """The truths that a forward reads from tensors in eager mode, by line."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._sites, self.read = CallSites(model), defaultdict[str, set[Any]](set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read[str(self._sites.here())].add(made)
        return made


def refuse_another_forward(model: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> bool:
    """Raise PlanError if the captured loss differs. Returns whether it was compared on batches that together take each
    branch on a value in eager mode.
    """
    if not _can_run(model, inputs, DEAR if program.traced else CHEAP):
        return False
    truths, are_compared = Truths(model), True
    for fill in (ones, mixed) if program.traced else (mixed,):
        batch = {name: fill(tensor) for name, tensor in inputs.items()}
        with put_back(model), in_eager_mode(), truths:
            eager = fixed_scalars(lambda b=batch: model(**b))
        if not eager:  # it fails on these values, or its loss is another in each call
            are_compared = False
            continue
        captured = scalars(lambda b=batch: _interpret(program, model, b))
        are_compared &= bool(captured)
        if captured and not any(_close([loss], captured) for loss in eager):
            with put_back(model), in_eager_mode(), caches_off(model):
                without_cache = scalars(lambda b=batch: model(**b))
            if any(_close([loss], captured) for loss in without_cache):
                raise PlanError(
                    f"with its key-value cache on, the model's loss is {float(eager[0]):.6g}; with it off, as in a "
                    f"training step, {float(captured[0]):.6g}",
                    where="use_cache",
                    fix="set model.config.use_cache = False (with it on, Hugging Face models ignore the documents in "
                    "position_ids)",
                )
            where = next(iter(program.traced), Where())
            raise PlanError(
                f"the model cannot be captured: in eager mode its loss is {float(eager[0]):.6g}, but traced it is "
                f"{float(captured[0]):.6g}",
                where=where,
                fix=_FIX,
            )
    return are_compared and all(len(answers) == 2 for answers in truths.read.values())


def _can_run(model: nn.Module, inputs: Mapping[str, Tensor], most: int) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    size, tokens = sum(t.numel() for t in tensors), sum(t.numel() for t in inputs.values())
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    floating = {t.dtype for t in tensors if t.is_floating_point()}
    return plain and floating <= set(TOLERANCE) and size * tokens <= most


def ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def mixed(tensor: Tensor) -> Tensor:
    """Integers 0 and 1, which are ids, labels and masks alike."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return torch.randint(2, tensor.shape, generator=generator).to(tensor.dtype)


def scalars(run: Callable[[], Any]) -> list[Tensor]:
    """The numbers among the outputs; none if it fails, as it may on unusual values."""
    try:
        found = tensors_in(plain_structure(run()))
    except Exception:
        return []
    return [t.detach() for t in found if t.numel() == 1 and t.is_floating_point()]


def fixed_scalars(run: Callable[[], Any]) -> list[Tensor]:
    """The same; none if random numbers are drawn, as by dropout."""
    before = torch.get_rng_state()
    found = scalars(run)
    return found if torch.equal(before, torch.get_rng_state()) else []


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return all(torch.allclose(a.double(), b.double(), rtol=_tolerance(a), atol=1e-7, equal_nan=True) for a, b in pairs)


def _tolerance(value: Tensor) -> float:
    return TOLERANCE.get(value.dtype, 1e-2)


def _interpret(program: Program, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    def own(fqn: str) -> Tensor:
        owner, _, name = fqn.rpartition(".")
        return getattr(model.get_submodule(owner), name)

    return run_program(fx.Interpreter(program.graph), program, own, batch)


def run_program(
    interpreter: fx.Interpreter, program: Program, own: Callable[[str], Tensor], batch: Mapping[str, Tensor]
) -> Any:
    """The outputs on a batch, without gradients. ``own``: a parameter or buffer by name; it is copied."""
    given: list[Any] = []
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.constants:
            given.append(program.constants[node.name].clone())
        elif node.name in program.inputs:
            given.append(batch[program.inputs[node.name]])
        else:
            given.append(own(program.parameters.get(node.name) or program.buffers[node.name]).detach().clone())
    with torch.no_grad():
        return interpreter.run(*given)


class InFloat64(fx.Interpreter):
    """Runs a graph in float64: its inputs are cast, and so is each call that names another float."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return widened(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_float64_for, (args, kwargs))
        return super().call_function(target, args, kwargs)


def widened(value: Any) -> Any:
    """A tensor of floats in float64; any other value unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _float64_for(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """The model, and all generators of random numbers, as they were."""
    state, buffers = PythonState(model), [(b, b.detach().clone()) for b in model.buffers()]
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), registry_kept(model.modules()):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        state.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
