"""What ranks run to score a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from planner.exchanges.scores import score_rows
from runtime import Engine
from runtime.scores import Scores
from tests.tools.jobs import Batches


def scores_of(plan: Any, batches: Batches) -> tuple[Scores, float]:
    """Of the first batch, twice with a training step and its gradients between that changes nothing."""
    with Engine(plan, timeout_seconds=60) as engine:
        first = engine.score(batches[0])
        engine.forward_backward(batches[1])
        again = engine.score(batches[0])
        assert first.log_probabilities.equal(again.log_probabilities)
        return first, engine.evaluate(batches[0])


def exchanged_for_scores(plan: Any, batches: Batches) -> tuple[int, int]:
    """Bytes that all ranks sum over the world for the scores of a batch, as seen and as planned."""
    seen: list[int] = []
    with Engine(plan, timeout_seconds=60) as engine:
        engine.score(batches[0])
        whole = dist.all_reduce

        def noted(x: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            if group is engine.groups.world:
                seen.append(x.numel() * x.element_size())
            return whole(x, *args, group=group, **options)

        dist.all_reduce = noted
        engine.score(batches[0])
        dist.all_reduce = whole
    rows = score_rows(plan.to_run()[0], len(batches[0]["labels"]))
    return sum(seen), sum(row.bytes for row in rows if row.axis == "world")
