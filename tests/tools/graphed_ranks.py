"""Layouts with and without graphs, trained on ranks that are forks of the process that planned.

The laboratory captures each model once, plans each layout once, and forks its ranks: four ranks that plan for
themselves would do the same four times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime import Engine
from tests.tools.graphed_runs import Trained, differences, figures, planned, train_on
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS

STEPS = 2


class OfRank(NamedTuple):
    """What one rank found; ``as_planned``: graphs, replays and static bytes are those of the plan.

    ``report``: of one more step, the tokens of each expert and the share that was dropped.
    """

    trained: Trained
    as_planned: bool
    report: tuple[Any, Any]


def trained_of_rank(plan: Any, batches: Any, captures: bool) -> OfRank:
    """On a rank: two steps, then a third that is reported. With ``captures`` graphs are captured before the first."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        if engine.graphs is not None and captures:
            engine.capture_graphs()
        trained = train_on(engine, batches[:STEPS])
        as_planned = engine.graphs is None or not captures or figures(engine) == planned(engine, STEPS)
        report = engine.train_step(batches[0])
        return OfRank(trained, as_planned, (report.expert_tokens, report.dropped_share))


def on_ranks(
    lab: Lab, name: str, scope: list[str] | None, *, captures: bool = True, mesh: dict[str, int], **sections: Any
) -> list[OfRank]:
    """One layout of a model of ``families``, by rank; ``scope`` None: without graphs."""
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    rest = {"train": "dropout" in name, **graphs, **sections}
    return lab.run(Case(name, mesh, rest, job=trained_of_rank, job_arguments=(captures,)))


def differ(eager: list[OfRank], graphed: list[OfRank]) -> list[list[str]]:
    """Of each rank, where the two are not the same to the last bit, or graphs are not as planned."""
    return [
        differences(a.trained, b.trained) + ["not as planned"] * (not b.as_planned)
        for a, b in zip(eager, graphed, strict=True)
    ]
