"""The commands `evaluate` and `generate`: ranks score a text, or continue prompts, and rank 0 returns the result.

Bad input is reported before any process starts; under torchrun this process is one of the ranks.
"""

import os
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from passes.errors import PlanError
from planner.capture.model.reference import adapter_directory, load_to_plan, pretrained_directory
from planner.frozen_plan import Plan
from planner.progress import bar
from planner.spec.spec import Spec
from runtime.checkpoint.adapters import check_adapters
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.checkpoint.saves import check_average, look, resolve
from runtime.compiled.requirements import check_machine
from runtime.data.reading import check_vocabulary, read_tokens
from runtime.data.text.encoders import Encoder
from runtime.data.token_file import check_content, is_token_file
from runtime.data.tokens import Tokens
from runtime.distributed.devices import launched
from runtime.distributed.launch import launch
from runtime.distributed.same_options import require_same, require_same_options, told_to_all
from runtime.engine.engine import Engine
from runtime.engine.next_tokens import Choice
from runtime.engine.prompts import codec_of, fitted, tokens_of
from runtime.evaluation.evaluate import Cloze, Perplexity, cloze, original_of, passages_of, perplexity
from runtime.evaluation.rows import RowBatches, windows_of
from runtime.shared_plan import Planned, num_ranks_of, planned, shared

TIMEOUT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights to load: of the save, or the last save in the directory, ``load`` (``averaged``: their running mean);
    else of the model ``reference``, if it is a directory with weights."""

    reference: str
    load: str | None = None
    averaged: bool = False

    @property
    def directory(self) -> Path | None:
        """The directory of pretrained weights, if no save is loaded."""
        return pretrained_directory(self.reference) if self.load is None else None

    @property
    def adapters(self) -> Path | None:
        """The directory of trained adapters, if no save is loaded: a save has its own."""
        return adapter_directory(self.reference) if self.load is None else None

    def model(self, seed: int) -> nn.Module:
        """Return the model to plan; if a save is loaded, without drawing values."""
        return load_to_plan(self.reference, seed, has_values=self.load is None)

    def check_load(self) -> None:
        """Raise PlanError if the save does not exist, or lacks the running mean."""
        if self.load is not None:
            save = resolve(Path(self.load))
            manifest = look(save)
            if self.averaged:
                check_average(save, manifest)
        elif self.averaged:
            what = "--ema selects the weights of a save, but --load is not given"
            raise PlanError(what, where="--ema", fix="add --load DIR")

    def check(self, decided: Plan) -> None:
        """Raise PlanError if files of weights do not fit the plan."""
        if (directory := self.directory) is not None:
            check_pretrained(decided, directory)
        if (adapters := self.adapters) is not None:
            check_adapters(decided, adapters)

    def into(self, engine: Engine, *, leads: bool) -> None:
        """Load the weights into ``engine``. ``leads``: this rank prints."""
        if self.load is not None:
            engine.load(self.load, averaged=self.averaged)
        elif (directory := self.directory) is not None:
            engine.load_pretrained(directory)
        elif leads:
            print(f"no --load: using the initial weights of {self.reference}", file=sys.stderr, flush=True)
        if (adapters := self.adapters) is not None:
            engine.load_adapters(adapters)


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """The options of one of the two commands, equal on all ranks, except those in ``own``. ``planned``: the file of the
    launcher's plan (``runtime.shared_plan``)."""

    own: ClassVar[tuple[str, ...]] = ("weights", "spec", "tokenizer")
    weights: Weights
    spec: str
    tokenizer: str | None = field(default=None, kw_only=True)
    planned: str | None = field(default=None, kw_only=True)

    def read_spec(self) -> Spec:
        """Load the spec. Raises PlanError for its errors."""
        return Spec.load(self.spec)

    @abstractmethod
    def read(self, spec: Spec, *, is_whole: bool = False) -> Any:
        """Read the text, or the tokenizer of prompts. ``is_whole``: check all bytes. Raises PlanError for bad input."""

    @abstractmethod
    def fitted(self, spec: Spec, decided: Plan, source: Any) -> Any:
        """Return ``work`` for ``run``. ``source``: the result of ``read``. Raises PlanError if it does not fit."""

    @abstractmethod
    def run(self, engine: Engine, source: Any, work: Any, *, leads: bool) -> Any:
        """Return the result of this rank. ``leads``: this rank prints."""


@dataclass(frozen=True, slots=True)
class Evaluation(Task):
    own: ClassVar[tuple[str, ...]] = (*Task.own, "data")
    data: str
    is_cloze: bool = False
    stride: int | None = None
    original_tokens: int | None = None

    def read_spec(self) -> Spec:
        return Spec.load(self.spec).longest

    def read(self, spec: Spec, *, is_whole: bool = False) -> Tokens:
        tokens = read_tokens(self.data, self.tokenizer)
        if is_whole and is_token_file(Path(self.data)):
            check_content(Path(self.data))  # the evaluation reads the whole file anyway
        return tokens

    def fitted(self, spec: Spec, decided: Plan, source: Tokens) -> int:
        """Return the number of sequences to score."""
        decisions, _ = decided.to_run()
        batches = RowBatches(spec, decisions.scored)
        with spec.locating():
            check_vocabulary(source, spec.require_inputs(), batches.roles, decisions.id_ranges)
        if self.is_cloze:
            return len(passages_of(source, batches.span).rows)
        original_of(source, self.original_tokens)
        return len(windows_of(source, batches.span, self.stride))

    def run(self, engine: Engine, source: Tokens, work: int, *, leads: bool) -> Perplexity | Cloze:
        require_same("the data (by content)", source.identity, engine.groups)
        self.weights.into(engine, leads=leads)
        with bar("scoring", work, enabled=leads) as progress:
            if self.is_cloze:
                return cloze(engine, source, progress=progress)
            options = {"stride": self.stride, "original_tokens": self.original_tokens}
            return perplexity(engine, source, **options, progress=progress)


@dataclass(frozen=True, slots=True)
class Continued:
    """One prompt and the text with which the model continues it. ``is_stopped``: the model ended it by an end token."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    is_stopped: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": list(self.tokens)}


@dataclass(frozen=True, slots=True)
class Generation(Task):
    """Prompts to continue. ``max_new_tokens``: None: as many as fit, up to 64; ``cache``: as in ``Engine.generate``."""

    prompts: tuple[str, ...]
    choice: Choice
    max_new_tokens: int | None = None
    cache: bool | None = None

    def read(self, spec: Spec, *, is_whole: bool = False) -> Encoder:
        codec = codec_of(self.tokenizer)
        fitted(self.prompts, codec, spec, self.max_new_tokens)
        return codec

    def fitted(self, spec: Spec, decided: Plan, source: Encoder) -> tuple[list[list[int]], int]:
        """Return the tokens of each prompt, and the number of new tokens for each."""
        return tokens_of(self.prompts, source, spec, decided, self.max_new_tokens)

    def run(
        self, engine: Engine, source: Encoder, work: tuple[list[list[int]], int], *, leads: bool
    ) -> list[Continued]:
        self.weights.into(engine, leads=leads)
        result = engine.generate(*work, stop=source.ends, cache=self.cache, **asdict(self.choice))
        if leads and result.uncached_because:
            why = result.uncached_because.replace("\n", "\n  at:  ")
            print(f"note: no cache of keys and values: each token runs the whole forward: {why}", file=sys.stderr)
        each = zip(self.prompts, result.tokens, result.is_stopped, strict=True)
        return [Continued(prompt, source.text(t.tolist()), tuple(t.tolist()), done) for prompt, t, done in each]


def evaluate(task: Evaluation, num_ranks: int | None = None) -> Perplexity | Cloze | None:
    """Return the result of the evaluation on rank 0, None on others. ``num_ranks``: local processes to start, by
    default the mesh's size.

    Raises PlanError for bad input, RankError when a rank fails.
    """
    return _on_all_ranks(task, num_ranks)


def generate(task: Generation, num_ranks: int | None = None) -> list[Continued] | None:
    """Return the continued prompts on rank 0, None on others. Arguments and errors as for ``evaluate``."""
    return _on_all_ranks(task, num_ranks)


def _on_all_ranks(task: Task, num_ranks: int | None) -> Any:
    """Check all input before any process starts, run the ranks, and return the result of rank 0."""
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        require_same_options(task, own=task.own)
        require_same_options(task.weights, own=("reference",), places=("load",))
        return run_rank(task)
    spec = task.read_spec()
    check_machine(spec)
    task.weights.check_load()
    source = task.read(spec, is_whole=True)
    own = planned(task.weights.model(spec.seed), spec)
    task.weights.check(own.plan)
    task.fitted(spec, own.plan, source)
    world_size = num_ranks_of(own.plan, spec, num_ranks)
    if world_size == 1:
        return run_rank(task, own)
    with shared(own.plan) as file:
        del own  # and its model: each rank builds its own
        return launch(run_rank, world_size, replace(task, planned=file), timeout_seconds=TIMEOUT_SECONDS)[0]


def run_rank(task: Task, own: Planned | None = None) -> Any:
    """Run one rank; rank 0 returns the result. ``own``: the plan, if this process made it."""
    leads = not launched(os.environ).rank
    with told_to_all():
        spec = task.read_spec()
        task.weights.check_load()
        source = task.read(spec)
        own = own or planned(task.weights.model(spec.seed), spec, task.planned)
        own.model = None
        work = task.fitted(spec, own.plan, source)
        engine = Engine(own.plan, mode="evaluate")
    with engine:
        own.forget_file()
        result = task.run(engine, source, work, leads=leads)
    return result if leads else None
