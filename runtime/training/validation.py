"""Validations of a run: a loss for each held-out set, and figures of the user's own (``--metric FILE.py:FUNCTION``).

    sets       --validation-data NAME=FILE, in their order, then the part that data.validation of the spec holds out
    first      its loss is the validation loss, which --keep-best and --patience follow; others are loss/NAME
    metric     function(log_probs, labels, batch) -> {name: (sum, count)}, of the rows of one dp rank in one batch;
               the figure is Σ sum / Σ count over batches and dp ranks: name, and name/NAME of the other sets

log_probs [rows, length] (float64): log P of each label, 0 where the loss takes none. labels: the batch's own tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from passes.errors import PlanError, first_line
from planner.named_code import NamedCode, line_of
from runtime.data.buckets import BucketBatches, OfLength
from runtime.data.token_batches import OwnRows
from runtime.distributed.agreement import agree
from runtime.distributed.exchange_json import all_gather_json
from runtime.engine import Engine
from runtime.report.step_row import StepRow

MOST_VALIDATED = 16  # batches of one validation
Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """``name``: \"\" for the part that the spec holds out, if it is the only set."""

    name: str
    batches: OfLength | BucketBatches


@dataclass(frozen=True, slots=True)
class Validation:
    """``loss``: of the first set. ``figures``: the others, as the log names them."""

    loss: float
    figures: Mapping[str, float]


def validate(sets: tuple[HeldOut, ...], engine: Engine, metric: Metric | None) -> Validation:
    """Over the same batches each time: all of a set, or a part of it. The same call on every rank.

    Raises PlanError, on every rank, if the metric fails on one.
    """
    losses, figures = [], dict[str, float]()
    for place, held_out in enumerate(sets):
        behind = f"/{held_out.name}" if place else ""
        rows = OwnRows(held_out.batches, engine.layout)
        batches = [rows.batch(step) for step in range(min(MOST_VALIDATED, held_out.batches.num_batches))]
        losses.append(fmean(engine.evaluate(batch, local=rows.is_local) for batch in batches))
        if place:
            figures[f"loss{behind}"] = losses[-1]
        if metric is not None:
            found = metric.of(batches, engine, is_local=rows.is_local)
            figures |= {f"{name}{behind}": value for name, value in found.items()}
    return Validation(losses[0], figures)


class Metric:
    """Owns the user's function."""

    def __init__(self, reference: str) -> None:
        """Runs its file. Raises PlanError if that fails, or has no such function."""
        self._function: Callable[..., Any] = NamedCode(reference, "--metric").load()

    def of(self, batches: list[dict[str, Tensor]], engine: Engine, *, is_local: bool) -> dict[str, float]:
        of_batches, error = list[Sums](), None
        for batch in batches:
            scores = engine.score(batch, local=is_local)
            try:
                of_batches.append(self._sums(self._function(scores.log_probabilities, batch[scores.key], batch)))
            except PlanError as refused:
                error = error or refused
            except Exception as raised:
                what = f"--metric failed: {first_line(raised)}"
                fix = "correct it, or remove --metric"
                error = error or PlanError(what, where=line_of(raised) or "--metric", fix=fix)
        agree(engine.groups, error)
        # every rank of a dp coordinate has the same; without own rows, all have
        own = [engine.mesh.dp_rank if is_local else 0, _added(of_batches)]
        of_dp = dict(all_gather_json(engine.groups, own))
        return _quotients(of_dp.values())

    def _sums(self, found: Any) -> Sums:
        pairs = found.items() if isinstance(found, Mapping) else [("", found)]
        for name, pair in pairs:
            is_pair = isinstance(name, str) and name and isinstance(pair, tuple | list) and len(pair) == 2
            if not is_pair or name in StepRow.__dataclass_fields__:
                what = f"--metric returned {name!r}: {pair!r:.80}" if name else f"--metric returned {found!r:.80}"
                fix = "return {name: (sum, count)}, with names that the log does not have yet"
                raise PlanError(what, where="--metric", fix=fix)
        return {name: (float(total), float(count)) for name, (total, count) in pairs}


def _added(parts: Iterable[Mapping[str, Any]]) -> Sums:
    """By name; a name may be in some of them alone."""
    total: Sums = {}
    for sums in parts:
        for name, (value, count) in sums.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + value, before[1] + count
    return total


def _quotients(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Raises PlanError for a figure that is no number: the same on every rank."""
    total = _added(of_ranks)
    found = {name: value / count if count else math.nan for name, (value, count) in total.items()}
    for name, value in found.items():
        if not math.isfinite(value):
            what = f"--metric: {name} is {total[name][0]:g} / {total[name][1]:g}"
            raise PlanError(what, where="--metric", fix="return a finite sum, and a count above 0 in some batch")
    return found
