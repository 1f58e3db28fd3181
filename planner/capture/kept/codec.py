"""A captured program as JSON and tensors, and a program again: nothing that is read can run (planner.files.values).

A program with a part that has no such form (a function of the user's own, a condition on values) raises Uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from passes.program.program import Program
from planner.capture.kept.uncertain import Uncertain
from planner.files.values import Reader, Unstorable, Writer

_META = {"val", "grad", "stopped", "parameter", "nn_module_stack", "stack_trace"}
_OVER = {"constant", "selected"}  # read only while the graph is brought into canonical form


def encode(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The part for JSON, and the constants that have values. Raises Uncertain."""
    if program.assumptions:
        raise Uncertain("the program has conditions on values")
    for node in program.graph.graph.nodes:
        if unknown := node.meta.keys() - _META - _OVER:
            raise Uncertain(f"{node.name} is marked by {', '.join(sorted(unknown))}")
    for name, value in program.constants.items():
        is_plain = type(value) is Tensor and value.device.type == "cpu" and value.is_contiguous()
        if not value.is_meta and (not is_plain or value.requires_grad):
            raise Uncertain(f"the constant {name} is no plain tensor of the host")
    writer = Writer(dropped=_OVER)
    try:
        found = writer.write(program)
    except Unstorable as error:
        raise Uncertain(str(error)) from None
    return {"program": found, "objects": writer.objects, "texts": list(writer.texts)}, writer.tensors


def decode(found: Mapping[str, Any], constants: Mapping[str, Tensor]) -> Program:
    """A new program each time. Raises KeyError, ValueError, TypeError, AttributeError, IndexError or ImportError if
    damaged."""
    return Reader(found["objects"], found["texts"], constants).read(found["program"])
