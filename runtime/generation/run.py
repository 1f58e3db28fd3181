"""The command `generate`: start the plan's ranks; together they continue the prompts, and rank 0 reports the texts.

Bad input is reported before a process starts; under torchrun this process is one of the ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.spec.spec import Spec
from runtime.compiled.compiler import check_compiler_here
from runtime.distributed.devices import launched
from runtime.distributed.launch import launch
from runtime.distributed.num_ranks import num_ranks_of
from runtime.distributed.same_options import require_same_options, told_to_all
from runtime.engine import Engine
from runtime.evaluation.weights import Weights
from runtime.next_tokens.choice import Choice
from runtime.next_tokens.texts import codec_of, fitted, tokens_of
from runtime.shared_plan import Planned, planned, shared

TIMEOUT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Continued:
    """One prompt and the text that the model continues it with. ``is_stopped``: whether its end token came."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    is_stopped: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": list(self.tokens)}


@dataclass(frozen=True, slots=True)
class Generation:
    """The options; the same on every rank. ``max_new_tokens``: None for as many as fit, up to 64. ``cache``: as of
    ``Engine.generate``. ``planned``: the file of the launcher's plan (``runtime.shared_plan``)."""

    weights: Weights
    spec: str
    prompts: tuple[str, ...]
    choice: Choice
    max_new_tokens: int | None = None
    tokenizer: str | None = None
    cache: bool | None = None
    planned: str | None = None


def generate(asked: Generation, num_ranks: int | None = None) -> list[Continued] | None:
    """The texts, on rank 0; None on the others. ``num_ranks``: local processes; the mesh's size if not given.

    Raises PlanError for bad input, RankError when a rank fails.
    """
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        require_same_options(asked, own=("weights", "spec", "tokenizer"))
        require_same_options(asked.weights, own=("reference",), places=("load",))
        return run_rank(asked)
    spec = Spec.load(asked.spec)
    check_compiler_here(spec)
    asked.weights.check_load()
    fitted(asked.prompts, codec_of(asked.tokenizer), spec, asked.max_new_tokens)
    made = planned(asked.weights.model(spec.seed), spec)
    asked.weights.check(made.plan)
    tokens_of(asked.prompts, codec_of(asked.tokenizer), spec, made.plan, asked.max_new_tokens)
    world_size = num_ranks_of(made.plan, spec, num_ranks)
    if world_size == 1:
        return run_rank(asked, made)
    with shared(made.plan) as file:
        del made  # with the model: each rank builds its own
        return launch(run_rank, world_size, replace(asked, planned=file), timeout_seconds=TIMEOUT_SECONDS)[0]


def run_rank(asked: Generation, made: Planned | None = None) -> list[Continued] | None:
    """The part of one rank; the first returns the texts. ``made``: the plan, if this process has it."""
    with told_to_all():
        spec = Spec.load(asked.spec)
        asked.weights.check_load()
        made, leads = (
            made or planned(asked.weights.model(spec.seed), spec, asked.planned),
            not launched(os.environ).rank,
        )
        made.model = None
        codec, choice = codec_of(asked.tokenizer), asked.choice
        sequences, count = tokens_of(asked.prompts, codec, spec, made.plan, asked.max_new_tokens)
        engine = Engine(made.plan, mode="evaluate")
    with engine:
        made.forget_file()
        asked.weights.into(engine, leads=leads)
        found = engine.generate(sequences, count, stop=codec.ends, cache=asked.cache, **asdict(choice))
    if not leads:
        return None
    if found.uncached_because:
        told = found.uncached_because.replace("\n", "\n  at:  ")
        print(f"note: keys and values are not kept, and each token runs the whole forward: {told}", file=sys.stderr)
    each = zip(asked.prompts, found.tokens, found.is_stopped, strict=True)
    return [Continued(prompt, codec.text(t.tolist()), tuple(t.tolist()), done) for prompt, t, done in each]
