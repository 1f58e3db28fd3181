"""The logits that predict the next token of each sequence, on the ranks that have them, and the token on all ranks.

The stages run as in an evaluation; that of the loss is lowered once more, to return these rows beside the loss.

    greedy      arg max z                                          the lowest id of equal ones
    sampled     arg max z/T + g,   g = −ln(−ln u)                  Gumbel: token i has the probability softmax(z/T)[i]
    top-k       only the k greatest z                              and those equal to the least of them
    top-p       only the most probable tokens, until their probabilities add up to p

u is a hash (passes.ops.dropout) of the seed, the prompt's index in the call, the position and the token: each layout
and each batch size generates the same tokens.

With kept rows, the forward of a prompt keeps the keys and values of its positions, and each further token is the
forward of one position. The sequences of a round advance together: positions that a longer prompt already has are
recomputed for it, with the same values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError
from passes.keep_rows import KEPT
from passes.loss_head import WANTED
from passes.ops.dropout import uniform_of
from passes.ops.kept_rows import KeptRows
from passes.ops.loss_head import ROW, Wanted
from planner.lower import lower_kept_rows
from runtime.distributed.agreement import all_gather_json
from runtime.engine.build import Built
from runtime.pipeline.executor import Executor, Step
from runtime.weights.shards import share

FIGURES = 3  # of each sequence: its next token, the number of ranks with its row, and the fault of the row
NOT_A_NUMBER, NOT_CAUSAL, NOT_KEPT = 1, 2, 3  # faults
ALLOWED = 8  # times the precision of the weights: two runs of one sequence may differ by rounding
SITE = "generate"
_WHOLE = "leave cache out: each token then runs the whole forward"


class NotKept(PlanError):
    """The error if the model or the layout allows no kept values of earlier positions, or if logits with kept values
    differ from those of the whole forward.
    """


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of tokens. ``temperature`` 0: greedy. Raises PlanError for invalid numbers."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            _refuse(
                f"the temperature is {self.temperature}", "temperature", "use 0 for the most probable token, or more"
            )
        if self.top_k is not None and self.top_k < 1:
            _refuse(f"top_k is {self.top_k}", "top_k", "use 1 or more, or leave it out")
        if self.top_p is not None and not (0.0 < self.top_p <= 1.0):
            _refuse(f"top_p is {self.top_p}", "top_p", "use a share above 0, up to 1, or leave it out")
        for name in ("top_k", "top_p"):
            if getattr(self, name) is not None and not self.temperature:
                _refuse(f"{name} limits sampling, and the temperature is 0", name, "set a temperature, such as 1.0")

    def tokens(self, logits: Tensor, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return tokens [n] (int64) from logits [n, v]. ``samples``, ``positions``: prompt and position of each."""
        z = logits.double()
        if not self.temperature:
            return z.argmax(1)
        z = _most_probable(_greatest(z / self.temperature, self.top_k), self.top_p)
        sample, position = (torch.tensor(x, device=z.device).unsqueeze(1) for x in (samples, positions))
        u = uniform_of(self.seed, SITE, position, sample, torch.arange(z.shape[1], device=z.device))
        return (z - (-u.log()).log()).argmax(1)


def _greatest(z: Tensor, k: int | None) -> Tensor:
    if k is None or k >= z.shape[1]:
        return z
    return z.masked_fill(z < z.topk(k, 1).values[:, -1:], -torch.inf)


def _most_probable(z: Tensor, p: float | None) -> Tensor:
    """Mask tokens after those with probability ``p`` together; the most probable token always stays."""
    if p is None or p == 1.0:
        return z
    ordered, ids = z.sort(dim=1, descending=True, stable=True)
    shares = ordered.softmax(1)
    is_beyond = shares.cumsum(1) - shares >= p
    return z.masked_fill(is_beyond.scatter(1, ids, is_beyond), -torch.inf)


def _refuse(what: str, where: str, fix: str) -> None:
    raise PlanError(what, where=where, fix=fix)


class NextRows:
    """The forwards that return rows of logits. Owns the stage of the loss that returns them, if this rank runs it.

    Raises PlanError if the loss gives no label a probability.
    """

    def __init__(self, built: Built, executor: Executor) -> None:
        self.layout, self.groups, self._wanted = built.layout, built.groups, Wanted(built.program.random)
        last, stages = built.headed(executor.stages, ROW)
        if last is not None:
            self._wanted = getattr(last.module, WANTED)
        self._precision = max(
            (torch.finfo(p.dtype).eps for s in stages for p in s.module.parameters() if p.is_floating_point()),
            default=0.0,
        )
        self.executor = executor.over(stages)

    def rows(self, step: Step, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [n, v], counts [n]) of this dp rank's n sequences; counts are 0 for rows on other ranks.

        ``wanted`` [microbatches of the global batch, micro]: places of labels.
        """
        self._wanted.places = wanted.to(self.groups.device)
        return _rows(self.executor, step)

    def faults(self, rows: Tensor, counts: Tensor, others: Tensor | None = None) -> Tensor:
        """Return the fault of each row, [n], or 0. ``others``: rows of the same sequences with other padding."""
        faults = torch.where(rows.isfinite().any(1) & ~rows.isnan().any(1), 0, NOT_A_NUMBER)
        if others is not None:
            size = rows.abs().nan_to_num(posinf=0.0).amax(1)
            apart = (rows - others).abs().nan_to_num(nan=0.0).amax(1)
            faults = torch.where(apart > ALLOWED * self._precision * size, NOT_CAUSAL, faults)
        return torch.where(counts > 0, faults, 0)

    def tokens(
        self,
        rows: Tensor,
        counts: Tensor,
        faults: Tensor,
        choice: Choice,
        samples: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """Return the next token of each sequence of the global batch, on every rank, by one all-reduce.

        ``samples``, ``positions``: of each sequence of the global batch. Raises PlanError on every rank for a fault.
        """
        total = torch.zeros((FIGURES, self.layout.global_size), dtype=torch.int64, device=self.groups.device)
        if len(rows):
            first = self.layout.first_microbatch * self.layout.micro
            own = slice(first, first + len(rows))
            chosen = torch.where(counts > 0, choice.tokens(rows.nan_to_num(nan=0.0), samples[own], positions[own]), 0)
            total[:, own] = torch.stack([chosen, counts.to(torch.int64), faults.to(torch.int64)])
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        chosen, times, wrong = total.cpu()
        _check(times, wrong, positions)
        return chosen.tolist()


def _check(times: Tensor, faults: Tensor, positions: Sequence[int]) -> None:
    if (times != 1).any():
        at = int((times != 1).nonzero()[0])
        what = f"the loss predicts the token at position {positions[at]} {int(times[at])} times"
        raise PlanError(what, where="loss", fix="generate with a model that predicts each token once")
    if (faults == NOT_CAUSAL).any():
        raise PlanError(
            "the prediction changes with the tokens behind it: the model is not causal, or its labels are the next "
            "tokens already",
            where="generate",
            fix="generate with a causal model; if it does not shift its labels, set data: {inputs: {LABELS: "
            "next_tokens}}",
        )
    if (faults == NOT_KEPT).any():
        raise NotKept(
            "the logits of one position, with the kept values of those before it, are not those of the whole forward",
            where="cache",
            fix=_WHOLE,
        )
    if (faults == NOT_A_NUMBER).any():
        at = int((faults == NOT_A_NUMBER).nonzero()[0])
        what = f"the logits of the token at position {positions[at]} hold a NaN, or nothing finite"
        raise PlanError(what, where="generate", fix="load other weights, or compute in a higher precision")


class KeptPositions:
    """The forwards with kept keys and values. Owns this rank's buffers, and its stages that fill and read them.

    Raises PlanError, on the ranks that detect it, if one position needs more than kept rows.
    """

    def __init__(self, built: Built, executor: Executor) -> None:
        self.groups, program = (groups := built.groups), built.program
        keeping, alone, self._precision = lower_kept_rows(built.plan, groups.rank, program, groups.device)
        self.kept, self._wanted = KeptRows(program.random), Wanted(program.random)
        for trained, *stages in zip(executor.stages, keeping, alone, strict=True):
            for stage in stages:
                share(trained, stage, groups.device)
                setattr(stage.module, KEPT, self.kept)
        for stage in keeping:
            if stage.has_scores:
                self._wanted = getattr(stage.module, WANTED)
        self._all, self._one = executor.over(keeping), executor.over(alone)

    def prefill(self, step: Step, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the buffers, and return the same as ``NextRows.rows``."""
        self._wanted.places = wanted.to(self.groups.device)
        return _rows(self._all, step)

    def at(self, position: int, step: Step) -> tuple[Tensor, Tensor]:
        """Return (logits [n, v], counts [n]) of the token after ``position``, of this dp rank's n sequences."""
        self.kept.at = position
        return _rows(self._one, step)

    def apart(self, rows: Tensor, whole: Tensor, counts: Tensor) -> Tensor:
        """Return NOT_KEPT for each counted row that differs from that of the ``whole`` forward, else 0: [n].

        Products of one row and of many rows sum in different orders; over all layers, rounding is less than the root of
        the precision.
        """
        size = whole.abs().nan_to_num(posinf=0.0).amax(1)
        differ = (rows - whole).abs().nan_to_num(nan=0.0).amax(1) > self._precision**0.5 * size
        return torch.where(differ & (counts > 0), NOT_KEPT, 0)

    @property
    def num_bytes(self) -> int:
        """Size of this rank's buffers in bytes."""
        return self.kept.num_bytes

    def free(self) -> None:
        """Drop the buffers."""
        self.kept.buffers.clear()


def _rows(executor: Executor, step: Step) -> tuple[Tensor, Tensor]:
    executor.evaluate(step)
    if not executor.scores:
        return torch.zeros(0, 1), torch.zeros(0)
    rows = torch.cat(executor.scores)
    return rows[:, :-1], rows[:, -1]


def kept_positions(built: Built, executor: Executor) -> KeptPositions | NotKept:
    """Return the forwards with kept rows; on every rank the first refusal, if any rank has one."""
    kept, own = None, None
    try:
        kept = KeptPositions(built, executor)
    except PlanError as error:
        own = error.words
    if refusals := [each for each in all_gather_json(built.groups, own) if each]:
        what, where, _ = refusals[0]
        return NotKept(what, where=where, fix=_WHOLE)
    assert kept is not None
    return kept
