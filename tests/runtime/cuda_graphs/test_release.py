"""Every graph is freed before any group of ranks ends, in whatever way: NCCL waits for graphs that hold its kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from runtime import Engine
from runtime.cuda_graphs.recorded import RecordedGraph
from runtime.distributed import groups as groups_file
from runtime.distributed.groups import Groups
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS

FREED, ENDED = "graph freed", "groups end"


def events_of_an_end(plan: Any, batches: Any, end: str) -> tuple[int, list[str]]:
    """How many graphs a rank had, and what happened in which order when its engine ended in the way ``end``."""
    events: list[str] = []

    def noting(event: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGraph, "reset", noting(FREED, RecordedGraph.reset))
        patch.setattr(Groups, "destroy", noting(ENDED, Groups.destroy))
        patch.setattr(groups_file, "abort_groups", noting(ENDED, lambda *_, **__: None))
        engine = Engine(plan, timeout_seconds=HANG_SECONDS)
        engine.capture_graphs()
        engine.train_step(batches[0])
        assert engine.graphs is not None
        num_graphs = engine.graphs.num_graphs
        if end == "close":
            engine.close()
        elif end == "error":
            with suppress(ArithmeticError), engine:
                raise ArithmeticError("the user's own code went wrong")
        else:
            engine.groups._end_with_the_process(ArithmeticError() if end == "exit by an error" else None)
    return num_graphs, events


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "error", "exit", "exit by an error"])
@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_all_graphs_are_freed_before_the_first_group_ends(lab: Lab, scope, end):
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    for num_graphs, events in lab.run(Case("llama", {"tp": 2}, graphs, job=events_of_an_end, job_arguments=(end,))):
        assert num_graphs > 0
        assert events[:num_graphs] == [FREED] * num_graphs
        assert FREED not in events[num_graphs:]
        assert (ENDED in events) == (end != "exit")
