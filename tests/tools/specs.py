"""Specs for the tests of specs: written to a file and loaded, or the words of what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from passes.errors import SpecError
from planner.spec.spec import Spec

MINIMAL = {"mesh": {"tp": 2}, "batch": {"global": 8, "micro": 2}}
TWO_LINES = "mesh: {tp: 2, pp: 2}\nbatch: {global: 8, micro: 2}\n"


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


# What a spec means
