"""The example notebook runs from top to bottom, and shows what stands in the file."""

from __future__ import annotations

import json

from tests.tools.notebooks import code_cells, outputs_of
from tests.tools.paths import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs_and_shows_what_stands_there() -> None:
    """``python -m tests.tools.notebooks examples/notebook.ipynb`` writes what it shows today."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found = outputs_of(NOTEBOOK)
    assert [cell["outputs"] for cell in code_cells(notebook)] == found
    assert sum(bool(outputs) for outputs in found) > 3
    assert any("text/html" in output.get("data", {}) for outputs in found for output in outputs)
