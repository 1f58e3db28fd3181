"""The command ``meshwright fuzz``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from passes.errors import PlanError
from planner.cli import MODEL_HELP, show_table

if TYPE_CHECKING:
    from runtime.fuzz.campaign import Campaign
    from runtime.fuzz.case import Case

EPILOG = "Examples: meshwright fuzz --minutes 10 · meshwright fuzz model.py:build spec.yaml · … --case fuzz-17.json"
FAILED = 1


def fuzz_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; default: random models.")] = None,
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="With MODEL: a spec with the keys to keep; all others are drawn."),
    ] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Number of cases; 20 without --minutes.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Start no new case after this time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first model; each further model adds 1.")] = 0,
    specs: Annotated[int, typer.Option(min=1, help="Specs per model, which is captured once.")] = 4,
    nproc: Annotated[int, typer.Option(help="Maximum number of ranks in a case.")] = 4,
    case: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rerun the case in this file instead of drawing cases.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the files of failing cases.")] = Path(),
) -> None:
    """Draw random models and specs, and compare each plan with one process: loss, gradients and three updates.

    Also the plan's file, its memory, and a save that another layout goes on from. Runs on CPUs alone. A failing case is
    shrunk to a minimal one and written to a file. Exit 1 on a failure.
    """
    from runtime.fuzz.campaign import COLUMNS, Campaign, processor_seconds, told
    from runtime.fuzz.case import Case
    from runtime.fuzz.own_model import OwnModel, need_spec
    from runtime.fuzz.prepare import prepare

    _check(nproc, folder, model, case)
    given = None if case is None else Case.load(case)
    prepare()
    own = None if model is None else OwnModel.read(model, need_spec(spec), nproc)
    campaign = Campaign(seed, nproc, folder, lambda words: typer.echo(words, err=True), own, specs)
    if given is not None:
        _run_again(campaign, given)
    before = processor_seconds()
    campaign.run(20 if cases is None and minutes is None else cases, None if minutes is None else minutes * 60)
    show_table("Cases", COLUMNS, campaign.rows())
    for failure in campaign.failures:
        typer.echo(told(failure))
    num_cases = max(1, sum(campaign.counts.values()))
    typer.echo(f"{(processor_seconds() - before) / num_cases:.1f} s of processor time a case", err=True)
    if campaign.failures:
        raise typer.Exit(FAILED)


def _check(nproc: int, folder: Path, model: str | None, case: Path | None) -> None:
    if nproc < 2:
        raise PlanError("a case needs at least 2 ranks", where="--nproc", fix="give 2 or more")
    if not folder.is_dir():
        raise PlanError("directory not found", where="--folder", fix="create it, or give another one")
    if model is not None and case is not None:
        raise PlanError(
            "--case cannot be combined with MODEL: the file of a case contains its model",
            where="--case",
            fix="remove MODEL and SPEC",
        )


def _run_again(campaign: Campaign, given: Case) -> None:
    outcome = campaign.outcome_of(given)
    words = f"{outcome.verdict}: {outcome.words}" if outcome.words else str(outcome.verdict)
    typer.echo(f"{words}\n{given}")
    raise typer.Exit(FAILED if outcome.verdict.is_failure else 0)
