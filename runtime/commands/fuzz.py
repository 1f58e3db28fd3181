"""The command ``meshwright fuzz``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from passes.errors import PlanError
from planner.commands.cli import MODEL_HELP, show_table
from runtime.options import option, takes

if TYPE_CHECKING:
    from runtime.fuzz.campaign import Campaign
    from runtime.fuzz.case import Case

EPILOG = "Examples: meshwright fuzz model.py:build spec.yaml --minutes 10 · meshwright fuzz --case fuzz-17.json"
COMMAND = "meshwright fuzz"
FAILED = 1


@dataclass(frozen=True)
class Options:
    """The options of this command, and of tests.fuzz, which draws models too."""

    cases: int | None = option("Number of cases; default: 20, or unlimited with --minutes.", "N", min=1)
    minutes: float | None = option("Start no new case after this time.", "MINUTES", min=0.0)
    seed: int = option("Seed of the first round of specs; each further round adds 1.", "N", default=0, min=0)
    specs: int = option("Specs per round; the model is captured once per round.", "N", default=4, min=1)
    nproc: int = option("Maximum number of ranks in a case.", "N", default=4)
    case: Path | None = option("Rerun the case in this file instead of drawing cases.", "FILE")
    folder: Path = option("Directory for the files of failing cases.", "DIR", default=Path())

    def check(self) -> None:
        """Raise PlanError for options that do not fit together, or a directory that does not exist."""
        drawing = ("cases", "minutes", "seed", "specs")
        unused = [f"--{name}" for name in drawing if getattr(self, name) != getattr(Options(), name)]
        if self.case is not None and unused:
            what = f"--case reruns one case: {', '.join(unused)} has no effect"
            raise PlanError(what, where="--case", fix=f"remove {', '.join(unused)}, or --case")
        if self.nproc < 2:
            raise PlanError("a case needs at least 2 ranks", where="--nproc", fix="give 2 or more")
        if not self.folder.is_dir():
            raise PlanError("directory not found", where="--folder", fix="create it, or give another one")


@takes(Options)
def fuzz_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}.")] = None,
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="A spec with the keys to keep; all others are drawn.")
    ] = None,
    *,
    options: Options,
) -> None:
    """Draw random specs for your model, and compare each plan with one process: loss, gradients and three updates.

    Each case also checks the saved plan, the predicted memory, and a save that another layout resumes from. Runs on the
    CPU only. A failing case is reduced to a minimal one and written to a file. Exit 1 on a failure.
    """
    from runtime.fuzz.campaign import Campaign
    from runtime.fuzz.case import Case, OwnModel
    from runtime.fuzz.forks import prepare

    options.check()
    if options.case is not None:
        if model is not None:
            what = "--case cannot be combined with MODEL: the file of a case contains its model"
            raise PlanError(what, where="--case", fix="remove MODEL and SPEC")
        run_again(Case.load(options.case, lambda values: OwnModel(**values)), options)
    reference, spec = _needed(model, spec)
    prepare()
    own = OwnModel.read(reference, spec, options.nproc)
    run_cases(
        Campaign(options.seed, options.nproc, options.folder, say, lambda _: own, options.specs), options, COMMAND
    )


def run_cases(campaign: Campaign, options: Options, command: str) -> None:
    """Draw cases and print the summary. Exits with 1 if a case failed. ``command``: the command that reruns a file."""
    from runtime.fuzz.campaign import COLUMNS, processor_seconds, told

    before, cases, minutes = processor_seconds(), options.cases, options.minutes
    campaign.run(20 if cases is None and minutes is None else cases, None if minutes is None else minutes * 60)
    show_table("Cases", COLUMNS, campaign.rows())
    for failure in campaign.failures:
        typer.echo(told(failure, command))
    num_cases = max(1, sum(campaign.counts.values()))
    typer.echo(f"{(processor_seconds() - before) / num_cases:.1f} s of processor time a case", err=True)
    if campaign.failures:
        raise typer.Exit(FAILED)


def run_again(case: Case, options: Options) -> None:
    """Run a case from a file, print its outcome, and exit."""
    from runtime.fuzz.campaign import Campaign
    from runtime.fuzz.forks import prepare

    prepare()
    outcome = Campaign(0, options.nproc, options.folder, say, lambda _: case.model).outcome_of(case)
    words = f"{outcome.verdict}: {outcome.words}" if outcome.words else str(outcome.verdict)
    typer.echo(f"{words}\n{case}")
    raise typer.Exit(FAILED if outcome.verdict.is_failure else 0)


say = partial(typer.echo, err=True)  # progress


def _needed(model: str | None, spec: Path | None) -> tuple[str, Path]:
    if model is None:
        what = "`meshwright fuzz` draws specs for your own model, but MODEL is missing"
        raise PlanError(what, where="MODEL", fix="give MODEL and SPEC, or --case FILE to rerun a failing case")
    if spec is None:
        what = "SPEC is missing, which describes the inputs and the batch of MODEL"
        raise PlanError(what, where="SPEC", fix="give a SPEC with `inputs` and `batch`")
    return model, spec
