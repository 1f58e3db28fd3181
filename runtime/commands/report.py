"""The command ``meshwright report``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from planner.commands.cli import Output, show_sections, write_text

EPILOG = "Example: meshwright report run.jsonl other.jsonl --format html -o runs.html"


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Logs of `train` (--log FILE.jsonl), or directories that contain them."),
    ],
    format: Annotated[
        Literal["table", "json", "html"], typer.Option(help="Output format; html is one self-contained page.")
    ] = "table",
    output: Output = None,
) -> None:
    """Compare runs over steps: losses, norms, rates, tokens per second, memory and bubble.

    If a trace lies beside a log (trace.json, or NAME.json beside NAME.jsonl), the report also compares measured with
    planned times of the actions.
    """
    from runtime.report.runs.page import page
    from runtime.report.runs.reading import read_runs
    from runtime.report.runs.table import json_parts, sections_of

    logs = read_runs(runs)
    if format == "html":
        write_text(page(logs), output)
    elif format == "json":
        write_text(json_parts(logs), output)
    else:
        show_sections(sections_of(logs), output)
