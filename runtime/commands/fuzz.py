"""The command ``meshwright fuzz``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import show_table
from planner.errors import PlanError

EPILOG = "Examples: meshwright fuzz --minutes 10 · meshwright fuzz --case fuzz-17.json"
FAILED = 1


def fuzz_command(
    cases: Annotated[int | None, typer.Option(min=1, help="Number of cases; 20 without --minutes.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Time after which no case is begun.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first case; the next case has the next seed.")] = 0,
    nproc: Annotated[int, typer.Option(help="Most ranks of a case.")] = 4,
    case: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run the case of this file again, in place of drawn ones.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where files of failing cases are written.")] = Path(),
) -> None:
    """Draw models and specs at random, and compare each plan with one process: loss, gradients and three updates.

    Runs on CPUs alone. A failing case is made as small as it still fails and written as a file. Exit 1 on a failure.
    """
    from runtime.fuzz.campaign import COLUMNS, Campaign
    from runtime.fuzz.case import Case
    from runtime.fuzz.prepare import prepare

    if nproc < 2:
        raise PlanError("a case of one rank shares nothing out", where="--nproc", fix="give 2 or more")
    if not folder.is_dir():
        raise PlanError("there is no such directory", where="--folder", fix="make it, or name another")
    given = None if case is None else Case.load(case)
    prepare()
    campaign = Campaign(seed, nproc, folder, lambda words: typer.echo(words, err=True))
    if given is not None:
        outcome = campaign.outcome_of(given)
        typer.echo(f"{outcome.verdict}: {outcome.words}\n{given}" if outcome.words else f"{outcome.verdict}\n{given}")
        raise typer.Exit(FAILED if outcome.verdict.is_failure else 0)
    campaign.run(20 if cases is None and minutes is None else cases, None if minutes is None else minutes * 60)
    show_table("Cases", COLUMNS, campaign.rows())
    if campaign.failures:
        raise typer.Exit(FAILED)
