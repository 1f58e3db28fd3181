"""The example notebook runs from top to bottom, without Jupyter, and shows what stands in the file.

    python -m tests.test_notebook examples/notebook.ipynb      # writes the outputs of this run into the file

The file is JSON: https://nbformat.readthedocs.io/en/latest/format_description.html.
"""

import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tools.paths import ROOT

Output = dict[str, Any]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(path: Path) -> list[list[Output]]:
    """Of each code cell; run in the folder of the file, as Jupyter does."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with _inside(path.parent):
        cells = code_cells(json.loads(path.read_text()))
        return [_run("".join(cell["source"]), namespace, number) for number, cell in enumerate(cells, start=1)]


def _run(source: str, namespace: dict[str, Any], number: int) -> list[Output]:
    tree, printed, shown = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    outputs = list[Output]()
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if shown is not None:
        html = getattr(shown, "_repr_html_", None)
        kind, text = ("text/html", html()) if html else ("text/plain", repr(shown))
        data = {kind: text.splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def write(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), outputs_of(path), strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def test_every_cell_of_the_notebook_runs_and_shows_what_stands_there() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found = outputs_of(NOTEBOOK)
    assert [cell["outputs"] for cell in code_cells(notebook)] == found
    assert sum(bool(outputs) for outputs in found) > 3
    assert any("text/html" in output.get("data", {}) for outputs in found for output in outputs)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
