"""Compare two captures: by their calls, and by values if a model keeps results.

    first call     freqs = outer(positions, inverse); self.cache[:n] = freqs; use(freqs)
    next call      use(self.cache[:n])                                          other calls, the same numbers

Values that depend on no batch tensor or parameter are computed, with the buffers that the previous call left. All other
values are equal if they apply the same ops to equal operands. Two graphs are equal if their results are.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from passes.program.known_values import computed, follows
from passes.program.source_lines import where_of
from passes.program.walks import ancestors
from planner.capture.data_dependence import not_captured
from planner.capture.functional import UnknownWrite, functional_graph
from planner.capture.model.exchange import has_values
from planner.capture.selection.space import Keys

MOST_ELEMENTS = 1 << 24


def first_difference(first: ExportedProgram, second: ExportedProgram, buffers: Mapping[str, Tensor]) -> fx.Node | None:
    """Return the call of ``first`` with which ``second`` differs; None if both compute the same.

    ``buffers``: by dotted name, their values before the first call, and those of frozen parameters.
    """
    differing = _first_other_call(first.graph, second.graph) or _reader_of_another_constant(first, second)
    if differing is None:
        return None
    try:
        before = _called(first, buffers)
        after = _called(second, before.buffers_after(buffers))
    except UnknownWrite:
        return differing
    return None if before.output == after.output and not after.changes else differing


def comes_to_rest(exported: ExportedProgram, written: Mapping[str, str], buffers: Mapping[str, Tensor]) -> bool:
    """Return whether a second call, with the buffers that the first one leaves, computes the same and leaves them so.

    ``exported`` is functional; ``written``: placeholder → the node of its last value; ``buffers`` as in
    ``first_difference``.
    """
    held = _held_values(exported, buffers)
    first = _Keys(exported, exported.graph, written, held)
    second = _Keys(exported, exported.graph, written, held | first.left)
    return first.output == second.output and not second.changes


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers and frozen parameters by dotted name."""
    return {**dict(model.named_buffers()), **{n: p for n, p in model.named_parameters() if not p.requires_grad}}


def refuse_other_constants(first: ExportedProgram, others: Iterable[ExportedProgram]) -> None:
    """Raise PlanError if another export of a forward reads another constant: Python computed it."""
    for other in others:
        reader = _reader_of_another_constant(first, other)
        if reader is not None:
            fix = "compute it with tensors, such as a mask and its sum, not with Python numbers"
            raise not_captured("a constant depends on a data-dependent selection", where_of(reader), fix)


def _first_other_call(first: fx.Graph, second: fx.Graph) -> fx.Node | None:
    nodes, theirs = ([n for n in graph.nodes if n.op != "placeholder"] for graph in (first, second))
    for i, node in enumerate(nodes):
        if i >= len(theirs) or _words(node) != _words(theirs[i]):
            return node
    return nodes[-1] if len(theirs) > len(nodes) else None


def _reader_of_another_constant(first: ExportedProgram, second: ExportedProgram) -> fx.Node | None:
    """Return a reader of a constant that differs, as ``torch.tensor(self.calls)`` in equal calls."""
    own, other = (_held_values(exported, {}) for exported in (first, second))
    for holder in first.graph.find_nodes(op="placeholder"):
        name = holder.name
        if name in own and (name not in other or fingerprint(own[name]) != fingerprint(other[name])):
            return next(iter(holder.users), holder)
    return None


def _words(node: fx.Node) -> tuple[str, ...]:
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs)


class _Keys(Keys):
    """Keys of one capture: that of a known value is its content. ``held``: values of placeholders before the call;
    ``left``: those of the placeholders ``written`` after it, if known.
    """

    def __init__(
        self, exported: ExportedProgram, graph: fx.Graph, written: Mapping[str, str], held: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._held, self._graph, self._written = held, graph, written
        self._names = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
        self.values: dict[fx.Node, Any] = {}
        *inner, output = graph.nodes
        for node in inner:
            self(node)
        self.output = str(fx.map_arg(output.args, self._named))
        nodes = {n.name: n for n in graph.nodes}
        values = {holder: self.values.get(nodes[last]) for holder, last in written.items()}
        self.left = {holder: value for holder, value in values.items() if isinstance(value, Tensor)}

    @property
    def changes(self) -> bool:
        """Return whether a result depends on a placeholder that the call leaves with another, or unknown, value."""
        both = self.left.keys() & self._held.keys()
        kept = {holder for holder in both if fingerprint(self.left[holder]) == fingerprint(self._held[holder])}
        read = ancestors(self._graph.output_node().all_input_nodes)
        return any(node.name in self._written.keys() - kept for node in read)

    def buffers_after(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``buffers``, by dotted name, after the call; without those with unknown values."""
        of_holder = {self._names[holder]: self.left.get(holder) for holder in self._written if holder in self._names}
        left = {name: of_holder.get(name, value) for name, value in buffers.items()}
        return {name: value for name, value in left.items() if value is not None}

    def _made(self, node: fx.Node) -> str:
        value = self._value(node)
        if value is not None:
            self.values[node] = value
        if isinstance(value, Tensor):
            return fingerprint(value)
        return f"{node.name} {self._names.get(node.name)}" if node.op == "placeholder" else super()._made(node)

    def _value(self, node: fx.Node) -> Any:
        """Return the value, if known: of constants, buffers, and values computed from them alone."""
        if node.op == "placeholder":
            return self._held.get(node.name)
        if not follows(node) or any(n not in self.values for n in node.all_input_nodes):
            return None
        expected = node.meta.get("val")
        if isinstance(expected, Tensor) and expected.numel() > MOST_ELEMENTS:
            return None
        with suppress(RuntimeError):  # a buffer that the capture has cast: unknown, and named by its computation
            return computed(node, self.values.__getitem__)
        return None


def _called(exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> _Keys:
    return _Keys(exported, *functional_graph(exported.graph_module), _held_values(exported, buffers))


def _held_values(exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return placeholder → value, of constants, buffers and frozen parameters that have one."""
    signature = exported.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    kept = [(name, buffers.get(target)) for name, target in named.items()]
    lifted = signature.inputs_to_lifted_tensor_constants
    kept += [(name, exported.constants.get(target)) for name, target in lifted.items()]
    return {name: value.detach() for name, value in kept if has_values(value)}


def fingerprint(value: Tensor) -> str:
    """Return a hash that is equal for CPU tensors of one dtype, shape and content."""
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def drawn(value: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a value of this shape: floats in float64; integers 0 and 1, which are ids, labels and masks alike."""
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return torch.randint(2, value.shape, generator=generator).to(value.dtype)


class InFloat64(fx.Interpreter):
    """Runs a graph in float64: casts its inputs, and replaces each floating-point dtype among arguments."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return widened(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        wider: Any = lambda dtype: torch.float64 if dtype.is_floating_point else dtype  # noqa: E731
        args, kwargs = pytree.tree_map_only(torch.dtype, wider, (args, kwargs))
        return super().call_function(target, args, kwargs)


def widened(value: Any) -> Any:
    """Return a floating-point tensor in float64; any other value unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
