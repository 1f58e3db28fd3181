"""Do two captures compute the same? Compares calls, and values if a model keeps results.

    first call     freqs = outer(positions, inverse); self.cache[:n] = freqs; use(freqs)
    next call      use(self.cache[:n])                                            other calls, the same numbers

Values without a batch tensor or parameter as input are computed, with buffers as the previous call left them; the rest
is equal if the same ops are applied to the same operands, down to those values. Two graphs are equal if their results
are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.errors import PlanError
from passes.program.constants import computed, follows
from passes.program.source_lines import where_of
from planner.capture.functional import UnknownWrite, functional_graph

MOST_ELEMENTS = 1 << 24


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


class _Keys:
    """For each value of one capture a key, equal if the values are. ``left``: buffers after the call, if known."""

    def __init__(self, exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> None:
        graph, written = functional_graph(exported.graph_module)
        self._held = _held_values(exported, buffers)
        self._names = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
        self.values: dict[fx.Node, Any] = {}
        self.keys: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if node.op == "output":
                self.output = str(fx.map_arg(node.args, self._named))
            else:
                self._note(node)
        nodes = {n.name: n for n in graph.nodes}
        self.left = dict(buffers)
        for holder, last in written.items():
            value = self.values.get(nodes[last])
            name = self._names.get(holder)
            if name in self.left and isinstance(value, Tensor):
                self.left[name] = value
            elif name is not None:
                self.left.pop(name, None)

    def _note(self, node: fx.Node) -> None:
        value = self._value(node)
        if value is not None:
            self.values[node] = value
        if isinstance(value, Tensor):
            self.keys[node] = fingerprint(value)
        elif node.op == "placeholder":
            self.keys[node] = f"{node.name} {self._names.get(node.name)}"
        else:
            words = (str(node.target), fx.map_arg(node.args, self._named), fx.map_arg(dict(node.kwargs), self._named))
            self.keys[node] = hashlib.sha256(str(words).encode()).hexdigest()

    def _named(self, node: fx.Node) -> Any:
        return _Key(self.keys[node])

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


class _Key(str):
    """Replaces an operand in a call; its text is the operand's key."""

    def __repr__(self) -> str:
        return f"<{self}>"


def _held_values(exported: ExportedProgram, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Placeholder → value, of constants, buffers and frozen parameters that have one."""
    found: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        kept: Any = None
        if spec.kind in (InputKind.BUFFER, InputKind.PARAMETER):
            kept = buffers.get(spec.target or "")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            kept = exported.constants.get(spec.target or "")
        if (
            isinstance(kept, Tensor)
            and not isinstance(kept, FakeTensor)
            and kept.layout is torch.strided
            and not kept.is_meta
        ):
            found[spec.arg.name] = kept.detach()
    return found


def fingerprint(value: Tensor) -> str:
    """Equal for tensors on the CPU of one dtype, shape and values."""
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    content = plain.contiguous().flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode() + content).hexdigest()
