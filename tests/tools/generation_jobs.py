"""What ranks run to continue prompts, and the same by definition in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.lower import kept_bytes, one_position
from runtime import Engine
from runtime.engine.next_tokens import KeptPositions
from tests.tools.jobs import Batches
from tests.tools.limits import HANG_SECONDS
from tests.tools.score_jobs import next_token_rows, sums_over_all

Prompts = Sequence[Sequence[int]]
PROMPTS: Prompts = (
    [3, 4, 5],
    [7, 8, 9, 10, 11, 3],
    [12],
    [20, 21],
    [30, 31, 32, 33],
    [5, 3],
    [3] * 4,
    [40],
    [9, 41, 42],
)
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 1.5, "seed": 3},
    "top-k": {"temperature": 1.0, "top_k": 7, "seed": 4},
    "top-p": {"temperature": 0.8, "top_p": 0.7, "seed": 5},
    "both": {"temperature": 1.2, "top_k": 30, "top_p": 0.8},
}


def continued(plan: Any, batches: Batches, count: int, ways: Sequence[str] = ("greedy",)) -> dict[str, list[list[int]]]:
    """The new tokens of ``PROMPTS``: more than a batch of 8 holds."""
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        return {way: [t.tolist() for t in engine.generate(PROMPTS, count, **SAMPLED[way]).tokens] for way in ways}


def both_ways(plan: Any, batches: Batches, count: int, ways: Sequence[str]) -> dict[str, Any]:
    """The new tokens with kept rows and without, whether any were kept, and why not."""
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        whole = {way: engine.generate(PROMPTS, count, cache=False, **SAMPLED[way]) for way in ways}
        kept = {way: engine.generate(PROMPTS, count, **SAMPLED[way]) for way in ways}
    told = {way.uncached_because for way in kept.values()}
    assert not any(way.is_cached or way.uncached_because for way in whole.values())
    return {
        "whole": {way: [t.tolist() for t in found.tokens] for way, found in whole.items()},
        "kept": {way: [t.tolist() for t in found.tokens] for way, found in kept.items()},
        "is cached": {found.is_cached for found in kept.values()},
        "because": told.pop() if len(told) == 1 else told,
    }


@torch.no_grad()
def greedy(model: nn.Module, prompts: Prompts, count: int) -> list[list[int]]:
    """By the unmodified model, one prompt at a time and without padding."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(count):
            output = model(input_ids=ids)
            logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def by_hugging_face(model: Any, prompts: Prompts, count: int) -> list[list[int]]:
    """By ``generate(do_sample=False)`` of transformers, with its cache."""
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        ids = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def exchanged(plan: Any, batches: Batches) -> dict[str, tuple[int, int]]:
    """Bytes that one more token costs beside a forward, by axis: as seen, and as planned."""
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        engine.generate(PROMPTS[:8], 1, cache=False)
        axis = engine.program.axes["tp"]

        def counted(count: int) -> tuple[int, int]:
            before = axis.bytes["all_gather", "forward"]
            with sums_over_all(engine) as seen:
                engine.generate(PROMPTS[:8], count, cache=False)
            return sum(seen), axis.bytes["all_gather", "forward"] - before

        one, two = counted(1), counted(2)
        times = engine.layout.num_microbatches
        has_loss = any(stage.has_loss for stage in engine.program.stages)
    rows = next_token_rows(plan.to_run()[0], 8)
    planned = {row.axis: row.bytes for row in rows}
    return {
        "world": (two[0] - one[0], planned.get("world", 0)),
        "tp": (two[1] - one[1], planned.get("tp", 0) * times * has_loss),
    }


def of_one_position(plan: Any, batches: Batches) -> dict[str, Any]:
    """Bytes over tp of one position of all microbatches, as seen and as planned, and bytes of the buffers likewise."""
    prompts, kept = [[3, 4, 5]] * 8, list[int]()
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        axis, freed = engine.program.axes["tp"], KeptPositions.free

        def noted(self: KeptPositions) -> None:
            kept.append(self.kept.num_bytes)
            freed(self)

        def seen(count: int) -> dict[tuple[str, str], int]:
            before = dict(axis.bytes)
            assert engine.generate(prompts, count, cache=True).is_cached
            return {key: size - before.get(key, 0) for key, size in axis.bytes.items()}

        KeptPositions.free = noted
        two, three = seen(2), seen(3)
        KeptPositions.free = freed
        times = engine.layout.num_microbatches
        kept.append(engine.kept_bytes())
        kept.append(kept_bytes(plan)[engine.mesh.pp_rank])
        program = list(one_position(plan))[engine.mesh.pp_rank][1]
    planned = {key: size * times for key, size in program.axes["tp"].bytes.items()}
    found = {key: three[key] - two[key] for key in three if three[key] != two[key]}
    return {"seen": found, "planned": planned, "kept": kept[0], "measured and planned": kept[-2:], "times": times}


def refused(plan: Any, batches: Batches, calls: Sequence[tuple[Any, int, dict[str, Any]]]) -> list[str]:
    """What the engine says to each call of ``generate``."""
    told = []
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        for prompts, count, options in calls:
            try:
                engine.generate(prompts, count, **options)
                told.append("")
            except PlanError as error:
                told.append(str(error))
    return told
