"""Specs for tests: the inputs that a batch or a model of ``families`` has; written to a file and loaded, or the words
of what is wrong with them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from passes.errors import SpecError
from planner.spec.spec import Spec
from tests.models.families import Entry

MINIMAL = {"mesh": {"tp": 2}, "batch": {"global": 8, "micro": 2}}
TWO_LINES = "mesh: {tp: 2, pp: 2}\nbatch: {global: 8, micro: 2}\n"


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {n: {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")} for n, x in batch.items()}


def entry_inputs(entry: Entry, *, bounded: bool = False) -> dict[str, Any]:
    """``bounded``: with the bounds of its integers."""
    return {
        name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        | ({"high": high} if high and bounded else {})
        for name, (shape, dtype, high) in entry.inputs.items()
    }


def load(tmp_path: Path, text: str) -> Spec:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return Spec.load(path)


def error(tmp_path: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def dict_error(**keys) -> str:
    with pytest.raises(SpecError) as caught:
        Spec.load({**MINIMAL, **keys})
    return str(caught.value)
