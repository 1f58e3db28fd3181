"""Random models and specs beside one process: python -m tests.fuzz [--minutes M | --cases N] [--seed S] [--case F]"""

from __future__ import annotations

from pathlib import Path

import typer

from passes.errors import PlanError
from runtime.commands import fuzz
from runtime.fuzz.forks import prepare
from tests.fuzz.drawing import COMMAND, campaign_of, read_case


def main(
    cases: fuzz.Cases = None,
    minutes: fuzz.Minutes = None,
    seed: fuzz.Seed = 0,
    specs: fuzz.Specs = 4,
    nproc: fuzz.Ranks = 4,
    case: fuzz.CaseFile = None,
    folder: fuzz.Folder = Path(),
) -> None:
    """Draw random models and specs, and compare each plan with one process. Exit 1 on a failure, 2 on bad input."""
    try:
        fuzz.check_ranks_and_folder(nproc, folder)
        if case is not None:
            fuzz.run_again(read_case(case), nproc, folder)
        prepare()
        fuzz.run_cases(campaign_of(seed, nproc, folder, fuzz.say, specs), cases, minutes, COMMAND)
    except PlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
