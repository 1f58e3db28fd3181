"""Validations of a run: a loss for each held-out set, and the user's own metrics (``--metric FILE.py:FUNCTION``).

    sets       --validation-data NAME=FILE, in order, then the part that data.validation of the spec holds out
    first      its loss is the validation loss, which --keep-best and --patience follow; others are loss/NAME
    metric     function(log_probs, labels, batch) -> {name: (sum, count)}, for the rows of one dp rank in one batch;
               the figure is Σ sum / Σ count over batches and dp ranks: name, and name/NAME for the other sets
    texts      FILE.py:FUNCTION:texts, with --prompts FILE: function(prompts, texts, rows) -> {name: (sum, count)}, for
               the texts with which the model continues the prompts, once per validation, on rank 0

log_probs [rows, length] (float64): log P of each label, 0 for labels that the loss ignores. labels: the batch's tensor.

DIR/best/step-00000040      the save after step 40, which replaces an earlier one
DIR/best_adapters           with --peft, the adapters of this step, as peft writes them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from passes.errors import PlanError, first_line
from planner.capture.model.reference import OPTION
from planner.files.named_code import NamedCode, line_of
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.data.buckets import BucketBatches, OfLength
from runtime.data.text.documents import STDLIB, rows_of, text_of
from runtime.data.text.encoders import BYTES
from runtime.data.token_batches import OwnRows
from runtime.data.token_file import files_in, is_token_file, open_token_file
from runtime.distributed.agreement import agree, agreed, all_gather_json, broadcast_json
from runtime.engine.engine import Engine
from runtime.engine.prompts import codec_of, fitted, tokens_of
from runtime.report.log import StepRow, Validation
from runtime.training.job import Job
from runtime.training.saving import prune_on_rank_0, say

MOST_VALIDATED = 16  # batches of one validation
Sums = dict[str, tuple[float, float]]
DIRECTORY, ADAPTERS = "best", "best_adapters"
TEXTS = ":texts"  # the end of the name of a metric of texts


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One set. ``name``: \"\" for the part that the spec holds out, if it is the only set."""

    name: str
    batches: OfLength | BucketBatches


def validate(sets: tuple[HeldOut, ...], engine: Engine, metric: Metric | TextMetric | None) -> Validation:
    """Return the losses and metrics over the same first batches of each set at every validation.

    All ranks must call it. Raises PlanError on every rank if the metric fails on one.
    """
    losses, figures = [], dict[str, float]()
    for place, held_out in enumerate(sets):
        suffix = f"/{held_out.name}" if place else ""
        rows = OwnRows(held_out.batches, engine.layout)
        batches = [rows.batch(step) for step in range(min(MOST_VALIDATED, held_out.batches.num_batches))]
        losses.append(fmean(engine.evaluate(batch, local=rows.is_local) for batch in batches))
        if place:
            figures[f"loss{suffix}"] = losses[-1]
        if isinstance(metric, Metric):
            own = metric.of(batches, engine, is_local=rows.is_local)
            figures |= {f"{name}{suffix}": value for name, value in own.items()}
    if isinstance(metric, TextMetric):
        figures |= metric.of(engine)
    return Validation(losses[0], figures)


def metric_of(job: Job, spec: Spec, decided: Plan) -> Metric | TextMetric | None:
    """Return the metric of ``job``. Raises PlanError for prompts that do not fit, or a missing function."""
    if job.metric is None:
        return None
    return TextMetric(job, spec, decided) if job.prompts is not None else Metric(job.metric)


def check_metric(job: Job, spec: Spec) -> None:
    """Raise PlanError for conflicting options, or prompts that fit no plan of ``spec``."""
    is_of_texts = job.metric is not None and job.metric.endswith(TEXTS)
    if is_of_texts != (job.prompts is not None):
        what = f"--prompts and --metric FILE.py:FUNCTION{TEXTS} need each other"
        raise PlanError(what, where="--prompts", fix="give both, or neither")
    if job.metric is not None:
        _function_of(job.metric)
    if job.prompts is not None:
        fitted(_prompts_of(job.prompts)[0], codec_of(tokenizer_of(job, "--prompts")), spec)


def _function_of(reference: str) -> Callable[..., Any]:
    return NamedCode(reference.removesuffix(TEXTS), "--metric").function(3)[0]


def _prompts_of(file: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the prompts, and their rows, JSON objects with a field prompt. Raises PlanError for other rows."""
    rows = list[dict[str, Any]]()
    for row in rows_of([Path(file)], None, lambda num_bytes: None):
        with row as fields:
            text_of(fields, "prompt")
            rows.append(fields)
    if not rows:
        raise PlanError(f"{file} has no prompt", where="--prompts", fix='give lines like {"prompt": "2 + 2 ="}')
    return [row["prompt"] for row in rows], rows


class TextMetric:
    """The user's metric of continued prompts."""

    def __init__(self, job: Job, spec: Spec, decided: Plan) -> None:
        assert job.metric is not None and job.prompts is not None  # noqa: PT018
        self._function, (self._prompts, self._rows) = _function_of(job.metric), _prompts_of(job.prompts)
        self._codec = codec_of(tokenizer_of(job, "--prompts"))
        self._tokens, self._count = tokens_of(self._prompts, self._codec, spec, decided)

    def of(self, engine: Engine) -> dict[str, float]:
        """Return the figures. All ranks must call it. Raises PlanError on all ranks if the function fails."""
        continued = engine.generate(self._tokens, self._count, stop=self._codec.ends).tokens
        sums: Sums = {}
        with agreed(engine.groups, rank_0_is_long=True):
            if engine.groups.rank == 0:
                texts = [self._codec.text(tokens.tolist()) for tokens in continued]
                sums = _sums(self._function, self._prompts, texts, self._rows)
        return _quotients([broadcast_json(engine.groups, sums, dict)])


def tokenizer_of(job: Job, option: str) -> str | None:
    """Return the tokenizer of prompts; a token file of samples contains it. Raises PlanError if there is none."""
    for source in job.sources:
        if source == STDLIB or not is_token_file(Path(source)):
            continue
        if files_in(Path(source)):
            return source
        name = open_token_file(Path(source), source).tokenization.name
        if name != BYTES.name:
            what = f"{source} has the tokens of {name}, but a token file does not contain a tokenizer for prompts"
            fix = "train on the text with --tokenizer FILE, or continue prompts with meshwright generate --load DIR"
            raise PlanError(what, where=option, fix=fix)
    return job.tokenizer


class Metric:
    """The user's metric of log-probabilities. Raises PlanError if its file fails, or lacks the function."""

    def __init__(self, reference: str) -> None:
        self._function = _function_of(reference)

    def of(self, batches: list[dict[str, Tensor]], engine: Engine, *, is_local: bool) -> dict[str, float]:
        of_batches, error = list[Sums](), None
        for batch in batches:
            scores = engine.score(batch, local=is_local)
            try:
                with engine.groups.in_users_code():
                    of_batches.append(_sums(self._function, scores.log_probabilities, batch[scores.key], batch))
            except PlanError as refused:
                error = error or refused
        agree(engine.groups, error)
        # ranks with the same dp coordinate have equal sums; without own rows, all ranks have
        own = [engine.mesh.dp_rank if is_local else 0, _added(of_batches)]
        of_dp = dict(all_gather_json(engine.groups, own))
        return _quotients(of_dp.values())


def _sums(function: Callable[..., Any], *arguments: Any) -> Sums:
    """Call the user's function. Raises PlanError, at the user's line, for its exceptions, and for another result."""
    try:
        returned = function(*arguments)
        pairs = returned.items() if isinstance(returned, Mapping) else [("", returned)]
        for name, pair in pairs:
            is_pair = isinstance(name, str) and name and isinstance(pair, tuple | list) and len(pair) == 2
            if not is_pair or name in StepRow.__dataclass_fields__:
                what = f"--metric returned {name!r}: {pair!r:.80}" if name else f"--metric returned {returned!r:.80}"
                fix = "return {name: (sum, count)}, with names that the log does not have yet"
                raise PlanError(what, where="--metric", fix=fix)
        return {name: (float(total), float(count)) for name, (total, count) in pairs}
    except PlanError:
        raise
    except Exception as error:
        what, fix = f"--metric failed: {first_line(error)}", "correct it, or remove --metric"
        raise PlanError(what, where=line_of(error) or "--metric", fix=fix) from error


def _added(parts: Iterable[Mapping[str, Any]]) -> Sums:
    """Add sums and counts by name; a name may be missing in some parts."""
    total: Sums = {}
    for sums in parts:
        for name, (value, count) in sums.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + value, before[1] + count
    return total


def _quotients(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return Σ sum / Σ count by name. Raises PlanError, on every rank, for a result that is not finite."""
    total = _added(of_ranks)
    quotients = {name: value / count if count else math.nan for name, (value, count) in total.items()}
    for name, value in quotients.items():
        if not math.isfinite(value):
            what = f"--metric: {name} is {total[name][0]:g} / {total[name][1]:g}"
            raise PlanError(what, where="--metric", fix="return a finite sum, and a count above 0 in some batch")
    return quotients


class Best:
    """The lowest validation loss, its step, and the number of validations since; equal on all ranks.

    ``extra``: stored in every save, not only in the best one; the lowest loss is added to it.
    """

    def __init__(self, engine: Engine, job: Job, extra: dict[str, Any]) -> None:
        self._engine, self._job, self._extra = engine, job, extra
        self._leads = engine.groups.rank == 0
        self.loss, self.step, self.num_since = math.inf, 0, 0

    def go_on(self, saved: dict[str, Any]) -> None:
        """Restore the state from the extra data ``saved`` of the save from which the run resumes."""
        best = saved.get("best")
        if isinstance(best, dict) and all(
            isinstance(best.get(name), int | float) for name in ("loss", "step", "since")
        ):
            self.loss, self.step, self.num_since = float(best["loss"]), int(best["step"]), int(best["since"])
            self._note()

    @property
    def is_over(self) -> bool:
        return self._job.patience is not None and self.num_since >= self._job.patience

    def see(self, loss: float | None) -> None:
        """Take the validation loss after a step, None if there was no validation."""
        if loss is None:
            return
        is_best = loss < self.loss
        if is_best:
            self.loss, self.step = loss, self._engine.step_index
        self.num_since = 0 if is_best else self.num_since + 1
        self._note()
        if is_best and self._job.keep_best:
            self._save()
        if self.is_over:
            line = f"stopped after step {self._engine.step_index}: {self.num_since} validations without a lower loss"
            say(f"{line} than {self.loss:.6f} after step {self.step}", leads=self._leads)

    def _note(self) -> None:
        if math.isfinite(self.loss) and (self._job.keep_best or self._job.patience is not None):
            self._extra["best"] = {"loss": self.loss, "step": self.step, "since": self.num_since}

    def _save(self) -> None:
        """Save the best step. A failure is a warning, as for other saves before the last."""
        assert self._job.save is not None
        directory = str(Path(self._job.save) / DIRECTORY)
        try:
            self._engine.save(directory, extra=self._extra)
            if OPTION in self._job.model:
                with nullcontext() if self._engine.optimizer.average is None else self._engine.averaged_weights():
                    self._engine.save_adapters(Path(self._job.save) / ADAPTERS)
        except PlanError as error:
            say(f"warning: the best step so far, {self.step}, is not saved: {error}", leads=self._leads)
            return
        prune_on_rank_0(self._engine, directory, 1)


def check_best(job: Job) -> None:
    """Raise PlanError for options that need validations, if there are none."""
    for option, is_asked in (("--keep-best", job.keep_best), ("--patience", job.patience is not None)):
        if is_asked and job.validate_every is None:
            fix = "add --validate-every N, and --validation-data NAME=FILE"
            raise PlanError(f"{option} needs a validation loss, but nothing is validated", where=option, fix=fix)
