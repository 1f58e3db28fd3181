"""Find a seed that shows a planted fault: python -m tests.tools.planted.search ['NAME' …] [--from SEED]

A seed counts if its case differs with the fault and is equal without it. Without names, the seeds of the table are
tried first, and every fault gets a line: name, seed, seconds of processor time of its case, first wrong tensor.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from planner.spec.spec import Spec
from runtime.fuzz import run, specs
from runtime.fuzz.campaign import Campaign, processor_seconds
from runtime.fuzz.case import Case
from runtime.fuzz.forks import StoreHost, in_fork, prepare
from runtime.fuzz.run import CASE_SECONDS, Captures, Outcome, Verdict
from tests.fuzz.drawing import DrawnModel, campaign_of, drawn_case, drawn_model
from tests.fuzz.drawn import models
from tests.tools.planted.fault import Fault
from tests.tools.planted.table import FAULTS

MOST_RANKS, MOST_SEEDS = 4, 500
# Options that came after the seeds of the table: without them, the seeds draw the cases that they were chosen for.
LATER_OF_MODEL, LATER_OF_SPEC = ("early_losses", "routing"), ("blocks recomputed", "half precision")


def case_of(seed: int) -> Case:
    """The case that ``seed`` draws, with the simplest of the later options."""
    case = drawn_case(seed, MOST_RANKS)
    model = DrawnModel(drawn_model(seed).chosen | {name: models.FIELDS[name][0] for name in LATER_OF_MODEL})
    return replace(case, model=model, spec=case.spec | {n: specs.FIELDS[n][0] for n in LATER_OF_SPEC})


def outcomes_of(seed: int, names: Sequence[str], host: StoreHost) -> dict[str, Outcome]:
    """Of the case that ``seed`` draws: without a fault (""), and with each of these. To be called in a fork.

    The model is captured once, without any: a fault that shows in captures alone would not be found.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case, captures = case_of(seed), Captures()
    run._planned(captures.of(case, spec := Spec.load(case.to_spec())), spec)
    run._other_layout(case, captures)
    return {
        name: in_fork(_outcome, name, case, captures, host, f"{seed:x}{number:02x}", timeout_seconds=CASE_SECONDS)
        for number, name in enumerate(("", *names))
    }


def _outcome(name: str, case: Case, captures: Captures, host: StoreHost, token: str) -> Outcome:
    host.begin(token)
    with FAULTS[name].planted() if name else nullcontext():
        return run._outcome(case, captures, host)


def found(fault: Fault, seeds: Iterator[int], campaign: Campaign) -> tuple[int, float, str] | None:
    """The first of ``seeds`` that shows ``fault``, the processor time of its case, and the difference."""
    for seed in seeds:
        case, begun = case_of(seed), processor_seconds()
        with fault.planted():
            outcome = campaign.outcome_of(case)
        spent = processor_seconds() - begun
        if outcome.verdict is Verdict.DIFFERS and campaign.outcome_of(case).verdict is Verdict.EQUAL:
            return seed, spent, outcome.words
    return None


def main(arguments: list[str]) -> None:
    at = arguments.index("--from") if "--from" in arguments else len(arguments)
    first, names = int((arguments[at:] or ["", "0"])[1]), arguments[:at] or list(FAULTS)
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        campaign = campaign_of(0, MOST_RANKS, Path(folder))
        for name in names:
            fault = FAULTS[name]
            known = [] if arguments[:at] else [fault.seed]
            result = found(fault, chain(known, range(first, first + MOST_SEEDS)), campaign)
            words = "not found" if result is None else f"seed {result[0]}  {result[1]:.1f} s  {result[2]}"
            print(f"{name}: {words}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
