"""The calls of an engine without gradients: losses, scores of labels, and generated text.

Text is generated on any layout, token by token, by forwards of the plan's stages:

prompt  →  forward at the smallest planned length that holds one token more  →  row of logits  →  token  →  …
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.data.batches import BatchLayout
from runtime.data.token_batches import roles_of
from runtime.distributed.faults.faults import shared_call
from runtime.distributed.same_options import require_same
from runtime.engine.build import Running
from runtime.engine.length_variants import Variant, Variants
from runtime.engine.log_probs import Scores
from runtime.engine.next_tokens import Choice, KeptPositions, NotKept
from runtime.engine.prompts import Feed, Prompts, check_lengths, sequences_of
from runtime.engine.weights import EngineWeights
from runtime.pipeline.executor import Executor, Step


@dataclass(frozen=True, slots=True)
class Generated:
    """The continuations of prompts, int64 tensors on the CPU. ``tokens``: the new ones of each prompt, with the stop
    token; ``sequences``: with the prompt. ``is_stopped``: whether a stop token ended it. ``is_cached``: whether keys
    and values were kept; if that was not possible, ``uncached_because`` names the op and its source line.
    """

    tokens: tuple[Tensor, ...]
    sequences: tuple[Tensor, ...]
    is_stopped: tuple[bool, ...]
    is_cached: bool = False
    uncached_because: str = ""


@dataclass
class _Row:
    """One prompt and its continuation. ``number``: index in the call; ``first``: length of the prompt."""

    number: int
    ids: list[int]
    first: int
    is_stopped: bool = False
    is_done: bool = False

    def add(self, token: int, call: _Call) -> None:
        self.ids.append(token)
        self.is_stopped = token in call.stops
        self.is_done = self.is_stopped or len(self.ids) == self.first + call.count


@dataclass(frozen=True)
class _Call:
    """One call of ``generate``: up to ``count`` new tokens for each prompt, or until one of ``stops``."""

    feed: Feed
    choice: Choice
    count: int
    stops: frozenset[int]


_Way = Callable[[_Call, Sequence[_Row]], None]


class EngineGeneration:
    """Losses, scores and text. ``step(variant, batch, local, counts)``: returns the checked step of a batch, with other
    denominators if ``counts`` is given.
    """

    def __init__(
        self,
        running: Running,
        weights: EngineWeights,
        variants: Variants,
        step: Callable[..., Step],
    ) -> None:
        self.running, self._weights, self._variants, self._step = running, weights, variants, step
        self._layout, self._decisions = variants.longest.layout, running.plan.to_run()[0]

    @shared_call("evaluation")
    def evaluate(self, batch: Mapping[str, Tensor], *, local: bool = False) -> float:
        """Return the loss of the global batch, without gradients and without dropout.

        If the loss is a sum over sequences, or one divided by counts, the batch may have any number of sequences: they
        run in rounds of the planned number. Raises PlanError for another loss.
        """
        return self.loss_of(self._layout.in_rows(batch), local=local)

    def loss_of(self, batch: Mapping[str, Tensor], *, local: bool) -> float:
        """Return the loss of a batch in rows, as ``evaluate``."""
        self._weights.ready()
        variant = self._variants.of(batch, local=local, any_number=True)
        rounds = variant.rounds.of(batch, local=local)
        if rounds[0] is not batch:
            ones = [torch.ones_like(self.running.nothing) for _ in self._decisions.terms.denominators]
            variant.rounds.require_silence(self._loss_of(variant, variant.rounds.nothing(batch), ones), batch)
            return self._loss_of(variant, rounds, variant.rounds.totals(rounds))
        step = self._step(variant, batch, local)
        variant.count_sums(step, training=False)
        return self.running.over_world(self.running.addend_of(variant.executor.evaluate(step)))

    def _loss_of(self, variant: Variant, rounds: Sequence[Mapping[str, Tensor]], counts: Sequence[Tensor]) -> float:
        """Return the loss of all rounds together, over ``counts``."""
        steps = (self._step(variant, each, False, counts) for each in rounds)
        addends = (self.running.addend_of(variant.executor.evaluate(step)) for step in steps)
        return self.running.over_world(sum(addends, self.running.nothing))

    @shared_call("evaluation")
    def score(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Scores:
        """Return the log-probability of each label of the global batch, and whether it is the arg max, without dropout
        and gradients. Logits are not gathered.

        Call it on all ranks, with the same batch of any number of sequences; all get the same result. ``local``: each
        dp rank passes its own rows of a batch of the planned size, and gets their scores.
        Raises PlanError, with the source line, for a loss that is not a cross-entropy over a vocabulary.
        """
        self._weights.ready()
        batch = self._layout.in_rows(batch)
        variant = self._variants.of(batch, local=local, any_number=True)
        rounds = variant.rounds.of(batch, local=local, scored=True)
        scores = [variant.scoring.score(self._step(variant, each, local), local=local) for each in rounds]
        return Scores.joined(scores, len(batch[scores[0].key]))

    def scoring_executor(self, batch: Mapping[str, Tensor]) -> Executor:
        """Return the loop over actions that ``score`` runs for ``batch``. Raises PlanError as ``score``."""
        return self._variants.of(self._layout.in_rows(batch), local=False, any_number=True).scoring.executor

    def log_probs(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Tensor:
        """Return log P of each label of the global batch, [sequences, length] (float64, on the CPU), without gradients
        and dropout; 0 at places without a target.

        Call it on all ranks, with the same batch of any number of sequences; all get the same result. ``local``: as in
        ``score``. Tensors of the batch that the plan does not read are ignored. Raises PlanError, with the source line,
        for a loss that is not a cross-entropy over a vocabulary.
        """
        return self.score(self._layout.planned(batch), local=local).log_probabilities

    @shared_call("generation")
    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] = (),
        seed: int = 0,
        cache: bool | None = None,
    ) -> Generated:
        """Continue each prompt by up to ``max_new_tokens`` tokens, or until one of ``stop``.

        Call it on all ranks, with the same prompts; all get the same result. ``prompts``: a dict with the input of
        tokens [n, length] and optionally an ``attention_mask``, or these tokens, or a list of prompts of any lengths.
        ``temperature`` 0: the most probable token; above 0: sampled from the ``top_k`` greatest logits and the most
        probable tokens up to probability ``top_p``. ``seed``: of sampling; tokens do not depend on the layout.

        ``cache``: keep keys and values, so that a token is the forward of one position and not of a planned length;
        None: if the model and the layout allow it, otherwise the result has the reason. It is for trying a model out,
        not for serving it. Raises PlanError on every rank for prompts that do not fit the plan, for a model that is not
        causal, and for ``cache=True`` if nothing can be kept.
        """
        choice, feed = Choice(temperature, top_k, top_p, seed), self._feed()
        ids = self._decisions.id_ranges.get(feed.name, ())
        sequences = sequences_of(prompts, feed.name, ids)
        stops = frozenset((stop,) if isinstance(stop, int) else stop)
        check_lengths(sequences, max_new_tokens, max(map(feed.length, self._variants.layouts)))
        call = repr((sequences, max_new_tokens, choice, sorted(stops), cache))
        require_same("the call of generate (by hash)", hashlib.sha256(call.encode()).hexdigest(), self.running.groups)
        self._weights.ready()
        run = partial(self._all, _Call(feed, choice, max_new_tokens, stops), sequences)
        rows, because = self._continued(run, cache)
        return Generated(
            tuple(torch.tensor(row.ids[row.first :]) for row in rows),
            tuple(torch.tensor(row.ids) for row in rows),
            tuple(row.is_stopped for row in rows),
            cache is not False and not because,
            because,
        )

    @shared_call("generation")
    def kept_bytes(self) -> int:
        """Return the bytes of keys and values that this rank keeps in ``generate``, measured at the longest planned
        length. All ranks must call it. Raises PlanError as ``generate`` with ``cache=True``.
        """
        feed, variant = self._feed(), self._variants.longest
        self._weights.ready()
        kept, sequences = variant.kept(), [[0]] * variant.layout.global_size
        try:
            batch = feed.batch(variant.layout, sequences, feed.paddings()[0])
            kept.prefill(self._fed(variant, batch), feed.wanted(variant.layout, sequences))
            return kept.num_bytes
        finally:
            kept.free()

    # ---- parts of a call

    def _continued(self, run: Callable[[_Way], list[_Row]], cache: bool | None) -> tuple[list[_Row], str]:
        """Return the rows, and the reason if keys and values could not be kept. ``run``: runs all prompts one way."""
        if cache is not False:
            try:
                return run(self._continue_kept), ""
            except NotKept as error:
                if cache:
                    raise
                because = "\n".join(filter(None, error.words[:2]))
                return run(self._continue), because
        return run(self._continue), ""

    def _all(self, call: _Call, sequences: Sequence[Sequence[int]], way: _Way) -> list[_Row]:
        """Continue all sequences, in rounds of prompts of similar lengths, as many as fit into a batch."""
        rows = [_Row(number, list(ids), len(ids)) for number, ids in enumerate(sequences)]
        by_length = sorted(rows, key=lambda row: row.first)
        size = self._variants.layouts[-1].global_size
        for first in range(0, len(rows), size):
            way(call, by_length[first : first + size])
        return rows

    def _continue_kept(self, call: _Call, rows: Sequence[_Row]) -> None:
        """Continue as ``_continue``, but by the forward of one position for all tokens after the first."""
        needed = max(row.first for row in rows) + call.count
        layout = next(each for each in self._variants.layouts if call.feed.length(each) >= needed)
        first = call.feed.batch(layout, [row.ids for row in self._filled(rows, layout)], call.feed.paddings()[0])
        variant = self._variants.of(first, local=False, any_number=True)
        kept = variant.kept()
        try:
            for row, token in zip(rows, self._next_tokens(call, rows, variant, kept=kept), strict=True):
                row.add(token, call)
            is_first = True
            while open_rows := [row for row in rows if not row.is_done]:
                at = min(len(row.ids) for row in open_rows) - 1
                tokens = self._tokens_at(call, rows, variant, kept, at, is_first=is_first)
                for row, token in zip(rows, tokens, strict=True):
                    if not row.is_done and len(row.ids) == at + 1:
                        row.add(token, call)
                is_first = False
        finally:
            kept.free()

    def _tokens_at(
        self, call: _Call, rows: Sequence[_Row], variant: Variant, kept: KeptPositions, at: int, *, is_first: bool
    ) -> list[int]:
        """Return the tokens after position ``at``, for the rows that end there. The first time, the whole forward runs
        too, and must return the same logits.
        """
        feed, filled = call.feed, self._filled(rows, variant.layout)
        sequences = [row.ids for row in filled]
        batch = feed.batch(variant.layout, sequences, feed.paddings()[0])
        logits, counts = kept.at(at, self._fed(variant, batch))
        faults = variant.next_rows.faults(logits, counts)
        if is_first:
            whole, _ = self._rows_of(variant, batch, feed.wanted(variant.layout, sequences))
            ends_here = torch.tensor([len(ids) == at + 1 for ids in sequences], device=logits.device)
            first = variant.layout.first_microbatch * variant.layout.micro
            faults = torch.maximum(faults, kept.apart(logits, whole, counts * ends_here[first : first + len(counts)]))
        places = [row.number for row in filled], [at + 1] * len(filled)
        return variant.next_rows.tokens(logits, counts, faults, call.choice, *places)[: len(rows)]

    def _filled(self, rows: Sequence[_Row], layout: BatchLayout) -> list[_Row]:
        """Return as many rows as fit into a batch; the first one is repeated."""
        return [*rows, *[rows[0]] * (layout.global_size - len(rows))]

    def _continue(self, call: _Call, rows: Sequence[_Row]) -> None:
        """Continue the prompts of one batch."""
        feed, is_first = call.feed, True
        while open_rows := [row for row in rows if not row.is_done]:
            longest = max(len(row.ids) for row in open_rows)
            layout = next(each for each in self._variants.layouts if feed.length(each) > longest)
            first = feed.batch(layout, [row.ids for row in self._filled(open_rows, layout)], feed.paddings()[0])
            variant = self._variants.of(first, local=False, any_number=True)
            tokens = self._next_tokens(call, open_rows, variant, is_first=is_first)
            for row, token in zip(open_rows, tokens, strict=True):
                row.add(token, call)
            is_first = False

    def _next_tokens(
        self,
        call: _Call,
        rows: Sequence[_Row],
        variant: Variant,
        *,
        is_first: bool = True,
        kept: KeptPositions | None = None,
    ) -> list[int]:
        """Return a token for each of ``rows`` by the whole forward, which fills the buffers of ``kept``."""
        feed = call.feed
        layout, filled = variant.layout, self._filled(rows, variant.layout)
        sequences, wanted = [row.ids for row in filled], feed.wanted(layout, [row.ids for row in filled])
        one, other = (feed.batch(layout, sequences, padding) for padding in feed.paddings())
        logits, counts = (
            self._rows_of(variant, one, wanted) if kept is None else kept.prefill(self._fed(variant, one), wanted)
        )
        others = self._rows_of(variant, other, wanted)[0] if is_first else None
        faults = variant.next_rows.faults(logits, counts, others)
        places = [row.number for row in filled], [len(row.ids) for row in filled]
        return variant.next_rows.tokens(logits, counts, faults, call.choice, *places)[: len(rows)]

    def _fed(self, variant: Variant, batch: dict[str, Tensor]) -> Step:
        variant.intake.check(batch, local=False)
        one = torch.ones((), dtype=torch.float64, device=self.running.groups.device)
        counts = [one] * len(self._decisions.terms.denominators)  # the loss is not read
        return variant.intake.step(batch, 0, None, local=False, counts=counts)

    def _rows_of(self, variant: Variant, batch: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, Tensor]:
        return variant.next_rows.rows(self._fed(variant, batch), wanted)

    def _feed(self) -> Feed:
        return Feed(roles_of(self._layout.inputs, self.running.spec.data.inputs), self._decisions.scored)
