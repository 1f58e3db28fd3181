"""A captured program as JSON and tensors, and a program again: nothing that is read can run.

    node        [op, name, target, args, kwargs, meta]        targets: getitem, and ops that are registered
    value       {"tensor": [shape, stride, offset, dtype, requires_grad]}        without memory
    argument    numbers, strings and None as they are; others as {kind: …}

A program with a part that has no such form (a function of the user's own, a condition on values) raises Uncertain.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from passes.errors import Where
from passes.program.program import Program
from planner.capture.kept.uncertain import Uncertain

_META = ("val", "grad", "stopped", "parameter", "nn_module_stack", "stack_trace")
_OVER = ("constant", "selected")  # read only while the graph is brought into canonical form
_PLAIN = ("parameters", "aliases", "buffers", "inputs", "outputs", "loss", "notes", "untrained")  # fields that are JSON
_OTHERS = {"graph", "constants", "rewrites", "traced", "skipped", "assumptions"}
_NUMBERS = (bool, int, float, str, type(None))
_NAMED: dict[Any, str] = {
    kind: kind.__name__ for kind in (torch.dtype, torch.device, torch.memory_format, torch.layout)
}


def encode(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The part for JSON, and the constants that have values. Raises Uncertain."""
    if {field.name for field in fields(Program)} != {*_PLAIN, *_OTHERS} or program.assumptions:
        raise Uncertain("the program has a part that has no form on disk")
    texts: dict[Any, int] = {}  # stack traces and stacks of modules repeat: each is written once
    found = {
        **{name: getattr(program, name) for name in _PLAIN},
        "rewrites": [[what, *astuple(where)] for what, where in program.rewrites],
        "traced": [astuple(where) for where in program.traced],
        "skipped": sorted(program.skipped),
        "constants": {name: _like(value) if value.is_meta else None for name, value in program.constants.items()},
        "nodes": [_node(node, texts) for node in program.graph.graph.nodes],
        "texts": list(texts),
    }
    constants = {name: value for name, value in program.constants.items() if not value.is_meta}
    for name, value in constants.items():
        if type(value) is not Tensor or value.device.type != "cpu" or not value.is_contiguous() or value.requires_grad:
            raise Uncertain(f"the constant {name} is no plain tensor of the host")
    return found, constants


def decode(found: Mapping[str, Any], constants: Mapping[str, Tensor]) -> Program:
    """A new program each time. Raises KeyError, ValueError, TypeError, AttributeError or IndexError if damaged."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph, nodes = fx.Graph(), {}
    for op, name, target, args, kwargs, meta in found["nodes"]:
        function = _function(target) if op == "call_function" else target
        node = graph.create_node(op, function, _read(args, nodes, mode), _read(kwargs, nodes, mode), name=name)
        if node.name != name:
            raise ValueError(f"two nodes are called {name}")
        node.meta = {key: _read_meta(key, value, found["texts"], mode) for key, value in meta.items()}
        nodes[name] = node
    return Program(
        graph=fx.GraphModule({}, graph),
        constants={n: constants[n] if like is None else _empty(like, "meta") for n, like in found["constants"].items()},
        rewrites=[(what, Where(*where)) for what, *where in found["rewrites"]],
        traced=[Where(*where) for where in found["traced"]],
        skipped=frozenset(found["skipped"]),
        **{name: found[name] for name in _PLAIN},
    )


def _node(node: fx.Node, texts: dict[Any, int]) -> list[Any]:
    if node.op not in ("placeholder", "call_function", "output"):
        raise Uncertain(f"{node.name} is a {node.op}")
    if unknown := node.meta.keys() - {*_META, *_OVER}:
        raise Uncertain(f"{node.name} is marked by {', '.join(sorted(unknown))}")
    target = _name_of(node) if node.op == "call_function" else str(node.target)
    meta = {key: _meta(key, value, texts) for key, value in node.meta.items() if key in _META}
    return [node.op, node.name, target, _written(node.args), _written(node.kwargs), meta]


def _name_of(node: fx.Node) -> str:
    name = "getitem" if node.target is operator.getitem else str(node.target)
    try:
        known = _function(name) is node.target
    except ValueError:
        known = False
    if not known:
        raise Uncertain(f"{node.name} calls {node.target}, which is not registered")
    return name


def _function(name: str) -> Any:
    """``getitem``, or a registered op. Raises ValueError for any other name."""
    if name == "getitem":
        return operator.getitem
    house, packet, overload = [*name.split("."), "", ""][:3]
    ops = getattr(getattr(torch.ops, house, None), packet, None)
    found = getattr(ops, overload, None) if isinstance(ops, OpOverloadPacket) else None
    if not isinstance(found, OpOverload):
        raise ValueError(f"no op {name}")
    return found


def _meta(key: str, value: Any, texts: dict[Any, int]) -> Any:
    if key == "nn_module_stack":
        value = tuple((name, *place) for name, place in value.items())
        if not all(isinstance(word, str) for entry in value for word in entry):
            raise Uncertain("a stack of modules holds classes")
    if key in ("nn_module_stack", "stack_trace"):
        return texts.setdefault(value, len(texts))
    return _written(value)


def _read_meta(key: str, value: Any, texts: list[Any], mode: FakeTensorMode) -> Any:
    if key == "nn_module_stack":
        return {name: (path, kind) for name, path, kind in texts[value]}
    return texts[value] if key == "stack_trace" else _read(value, {}, mode)


def _written(value: Any) -> Any:
    """An argument or a value, as JSON can hold it."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if type(value) is FakeTensor and value.device.type == "cpu" and value.layout is torch.strided:
        return {"tensor": _like(value)}
    if type(value) in _NAMED:
        return {_NAMED[type(value)]: str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [_written(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, (list, tuple)) and type(value).__name__ in ("list", "tuple", "immutable_list", "Size"):
        return {"list" if isinstance(value, list) else "tuple": [_written(part) for part in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _written(part)] for key, part in value.items()]}
    raise Uncertain(f"an argument is a {type(value).__name__}")


def _read(given: Any, nodes: Mapping[str, fx.Node], mode: FakeTensorMode) -> Any:
    if not isinstance(given, dict):
        return given
    ((kind, held),) = given.items()
    match kind:
        case "node":
            return nodes[held]
        case "tensor":
            with mode:
                return _empty(held, "cpu")
        case "device":
            return torch.device(held)
        case "dtype" | "memory_format" | "layout":
            return _of_torch(kind, held)
        case "slice":
            return slice(*(_read(part, nodes, mode) for part in held))
        case "list" | "tuple":
            parts = [_read(part, nodes, mode) for part in held]
            return parts if kind == "list" else tuple(parts)
        case "dict":
            return {key: _read(part, nodes, mode) for key, part in held}
    raise ValueError(f"no kind {kind}")


def _of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, getattr(torch, kind)):
        raise ValueError(f"no {kind} {name}")
    return found


def _like(value: Tensor) -> list[Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    return [list(value.shape), list(value.stride()), value.storage_offset(), dtype, value.requires_grad]


def _empty(like: list[Any], device: str) -> Tensor:
    shape, stride, offset, dtype, requires_grad = like
    kind = _of_torch("dtype", dtype)
    if not offset:
        return torch.empty_strided(shape, stride, dtype=kind, device=device, requires_grad=requires_grad)
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    whole = torch.empty((max(last, 0),), dtype=kind, device=device)
    return whole.as_strided(shape, stride, offset).requires_grad_(requires_grad)
