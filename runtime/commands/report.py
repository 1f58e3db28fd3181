"""The command ``meshwright report``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.cli import show_sections, write_text

EPILOG = "Example: meshwright report run.jsonl other.jsonl --format html -o runs.html"


class ReportFormat(StrEnum):
    table = "table"
    json = "json"
    html = "html"


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Logs of train (--log FILE.jsonl), or directories that hold them."),
    ],
    format: Annotated[ReportFormat, typer.Option(help="How to show them; html is one page.")] = ReportFormat.table,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here, not to stdout.")
    ] = None,
) -> None:
    """Set runs side by side: losses, norms, rates, tokens a second, memory and bubble over steps.

    A trace that lies beside a log (trace.json, or NAME.json beside NAME.jsonl) gives the times of actions, measured
    beside planned.
    """
    from runtime.report.runs.page import page
    from runtime.report.runs.reading import read_runs
    from runtime.report.runs.table import sections_of, to_dict

    found = read_runs(runs)
    if format is ReportFormat.html:
        write_text(page(found), output)
    elif format is ReportFormat.json:
        write_text(json.dumps(to_dict(found), indent=2), output)
    elif output is not None:
        from planner.report.text import sections_text

        write_text(sections_text(sections_of(found)), output)
    else:
        show_sections(sections_of(found))
