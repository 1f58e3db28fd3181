"""Random models and specs beside one process: python -m tests.fuzz [--minutes M | --cases N] [--seed S] [--case F]"""

import typer

from passes.errors import PlanError
from runtime.commands import fuzz
from runtime.fuzz.forks import prepare
from runtime.options import takes
from tests.fuzz.drawing import COMMAND, campaign_of, read_case


@takes(fuzz.Options)
def main(asked: fuzz.Options) -> None:
    """Draw random models and specs, and compare each plan with one process. Exit 1 on a failure, 2 on bad input."""
    try:
        asked.check()
        if asked.case is not None:
            fuzz.run_again(read_case(asked.case), asked)
        prepare()
        campaign = campaign_of(asked.seed, asked.nproc, asked.folder, fuzz.say, asked.specs)
        fuzz.run_cases(campaign, asked, COMMAND)
    except PlanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
