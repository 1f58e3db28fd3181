"""Captured programs in files, for ``captures``: as JSON and tensors, by which runs of the tests share them.

A program with a part that has no such form (a function of the user's own, a condition on values) raises Uncertain.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.program.program import Program
from planner.files import values
from planner.files.atomic import replaced_file
from tests.tools.model_digest import Uncertain

META = {"val", "grad", "known", "stopped", "parameter", "nn_module_stack", "stack_trace"}
META |= {"selected", "cut_whole", "unsqueezed"}  # read when the loss is shared out
OVER = {"constant"}  # read only while the graph is brought into canonical form
MOST_FILES = 64

Kept = tuple[dict[str, Any], dict[str, Tensor]]


def encode(program: Program) -> Kept:
    """The part for JSON, and the constants that have values. Raises Uncertain."""
    if program.assumptions:
        raise Uncertain("the program has conditions on values")
    for node in program.graph.graph.nodes:
        if unknown := node.meta.keys() - META - OVER:
            raise Uncertain(f"{node.name} is marked by {', '.join(sorted(unknown))}")
    for name, value in program.constants.items():
        is_plain = type(value) is Tensor and value.device.type == "cpu" and value.is_contiguous()
        if not value.is_meta and (not is_plain or value.requires_grad):
            raise Uncertain(f"the constant {name} is no plain tensor of the host")
    writer = values.Writer(dropped=OVER)
    try:
        found = writer.write(program)
    except values.Unstorable as error:
        raise Uncertain(str(error)) from None
    return {"program": found, "objects": writer.objects, "texts": list(writer.texts)}, writer.tensors


def decode(found: Mapping[str, Any], constants: Mapping[str, Tensor]) -> Program:
    """A new program each time."""
    return values.Reader(found["objects"], found["texts"], constants).read(found["program"])


def settled(program: Program) -> tuple[Program, Kept]:
    """The program as read back, and its kept form. Raises Uncertain if reading it back would give another program."""
    found, constants = encode(program)
    text = json.dumps(found)
    kept = json.loads(text), {name: value.clone() for name, value in constants.items()}
    again = decode(*kept)
    if json.dumps(encode(again)[0]) != text:
        raise Uncertain("the program would be another when it is read")
    return again, kept


def read(file: Path) -> Program | None:
    """None if there is none, or another version wrote it."""
    try:
        constants: Any = torch.load(file, weights_only=True)
        return decode(json.loads(constants.pop("json")), constants)
    except Exception:  # of files, of torch, of what is read
        return None


def write(file: Path, kept: Kept) -> None:
    """The oldest files of the directory make room. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(file) as opened:
        torch.save({"json": json.dumps(kept[0]), **kept[1]}, opened)
    for old in sorted(file.parent.glob("*.pt"), key=lambda path: -path.stat().st_mtime_ns)[MOST_FILES:]:
        old.unlink(missing_ok=True)
