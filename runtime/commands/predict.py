"""The command ``meshwright predict``: seconds and bytes of runs that were measured, beside the measurements."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from passes.errors import PlanError
from planner.cli import Format, NoCache, Output, show_sections, write_text

if TYPE_CHECKING:
    from torch import nn

EPILOG = "Example: meshwright predict examples/runs.json -o table.txt"


def predict_command(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="JSON or YAML file of runs, with what was measured.")],
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
    no_cache: NoCache = False,
) -> None:
    """Predict step time and memory of measured runs, and compare: errors, rank correlation, which layouts fit.

    A run with an error is named; the others are predicted. If none can be, the command fails.
    """
    from planner.predict.predict import Predictor
    from planner.predict.runs import Unread, read_runs
    from planner.predict.table import sections, to_dict
    from planner.search.progress import shown_progress

    asked, predictor = read_runs(runs), Predictor(built)
    found = []
    with shown_progress() as progress:
        for done, run in enumerate(asked):
            progress("predicting runs", done, len(asked))
            found.append(predictor.of(run))
    failed = [row for row in found if isinstance(row, Unread)]
    if len(failed) == len(found):
        what = f"none of the {len(found)} runs can be predicted; {failed[0].name}: {failed[0].why}"
        raise PlanError(what, where=str(runs), fix="correct the runs")
    if format is Format.json:
        write_text(json.dumps(to_dict(found), indent=2), output)
    else:
        show_sections(sections(found), output)


def built(model: str | dict[str, Any]) -> nn.Module:
    """MODEL of the command line, or the model of a Hugging Face config's values; on meta. Raises PlanError."""
    from planner.capture.model.reference import load_model

    if isinstance(model, str):
        return load_model(model)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(model))
        return load_model(f"hf:{file}")
