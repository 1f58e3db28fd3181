"""The command `evaluate`: start the plan's ranks; each scores its share, and rank 0 reports the result.

Bad input is reported before a process starts; under torchrun this process is one of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.compiled.compiler import check_compiler_here
from runtime.cuda_graphs.choice import check_backend_here
from runtime.data.reading import read_tokens
from runtime.data.token_file import check_content, is_token_file
from runtime.data.tokens import Tokens
from runtime.data.vocabulary import check_vocabulary
from runtime.distributed.devices import launched
from runtime.distributed.launch import launch
from runtime.distributed.num_ranks import num_ranks_of
from runtime.distributed.same_options import require_same_data, require_same_options, told_to_all
from runtime.engine import Engine
from runtime.evaluation.evaluate import Progress, cloze, original_of, perplexity, rows_of
from runtime.evaluation.measures import Cloze, Perplexity
from runtime.evaluation.rows import RowBatches
from runtime.evaluation.weights import Weights
from runtime.shared_plan import Planned, planned, shared

TIMEOUT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The options; the same on every rank. ``load``: a save of training, or a directory of saves. ``averaged``: score
    the running mean of the saved weights. ``planned``: the file of the launcher's plan (``runtime.shared_plan``)."""

    model: str
    spec: str
    data: str
    tokenizer: str | None = None
    is_cloze: bool = False
    stride: int | None = None
    original_tokens: int | None = None
    load: str | None = None
    averaged: bool = False
    planned: str | None = None

    def read_spec(self) -> Spec:
        """Raises PlanError."""
        return Spec.load(self.spec).longest

    @property
    def weights(self) -> Weights:
        return Weights(self.model, self.load, self.averaged)


def evaluate(asked: Evaluation, num_ranks: int | None = None) -> Perplexity | Cloze | None:
    """The result of the evaluation, on rank 0; None on the others. ``num_ranks``: local processes; the mesh's size if
    not given.

    Raises PlanError for bad input, RankError when a rank fails.
    """
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        require_same_options(asked, own=("model", "spec", "data", "tokenizer"), places=("load",))
        return run_rank(asked)
    world_size, made = _checked(asked, num_ranks)
    if world_size == 1:
        return run_rank(asked, made)
    with shared(made.plan) as file:
        del made  # with the model: each rank builds its own
        return launch(run_rank, world_size, replace(asked, planned=file), timeout_seconds=TIMEOUT_SECONDS)[0]


def _checked(asked: Evaluation, num_ranks: int | None) -> tuple[int, Planned]:
    """The number of ranks, and the plan. Raises PlanError for all that is known to be wrong before a process starts."""
    spec = asked.read_spec()
    check_backend_here(spec)
    check_compiler_here(spec)
    tokens = read_tokens(asked.data, asked.tokenizer)
    if is_token_file(Path(asked.data)):
        check_content(Path(asked.data))  # all of it will be read anyway
    asked.weights.check_load()
    made = planned(asked.weights.model(spec.seed), spec)
    asked.weights.check(made.plan)
    _num_rows(asked, spec, made.plan, tokens)
    return num_ranks_of(made.plan, spec, num_ranks), made


def _num_rows(asked: Evaluation, spec: Spec, decided: Plan, tokens: Tokens) -> int:
    """How many sequences are to be scored. Raises PlanError if text, spec or model do not serve."""
    decisions, _ = decided.to_run()
    batches = RowBatches(spec, decisions.scored)
    try:
        check_vocabulary(tokens, spec.require_inputs(), batches.roles, decisions.id_ranges)
    except PlanError as error:
        raise spec.locate(error) from None
    if not asked.is_cloze:
        original_of(tokens, asked.original_tokens)
    return len(rows_of(tokens, batches, is_cloze=asked.is_cloze, stride=asked.stride))


def run_rank(asked: Evaluation, made: Planned | None = None) -> Perplexity | Cloze | None:
    """The evaluation of one rank; the first returns the result. ``made``: the plan, if this process has it."""
    with told_to_all():
        spec = asked.read_spec()
        asked.weights.check_load()
        tokens = read_tokens(asked.data, asked.tokenizer)
        leads = not launched(os.environ).rank
        made = made or planned(asked.weights.model(spec.seed), spec, asked.planned)
        made.model = None
        num_rows = _num_rows(asked, spec, made.plan, tokens)
        engine = Engine(made.plan, mode="evaluate")
    with engine:
        made.forget_file()
        require_same_data(tokens.identity, engine.groups)
        asked.weights.into(engine, leads=leads)
        with _shown(num_rows, enabled=leads) as progress:
            found = _measured(engine, asked, tokens, progress)
    return found if leads else None


def _measured(engine: Engine, asked: Evaluation, tokens: Tokens, progress: Progress) -> Perplexity | Cloze:
    if asked.is_cloze:
        return cloze(engine, tokens, progress=progress)
    given = asked.original_tokens
    return perplexity(engine, tokens, stride=asked.stride, original_tokens=given, progress=progress)


@contextmanager
def _shown(num_rows: int, *, enabled: bool) -> Iterator[Progress]:
    """A line of how many rows are done and how long it will take, in a terminal alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task("score", total=num_rows)
        yield lambda done: bar.advance(task, done)
