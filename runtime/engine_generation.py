"""Text from a model on any layout: one token after another, each by a forward of the plan's stages.

prompt  →  forward at the smallest planned length that holds one token more  →  row of logits  →  token  →  …
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.decisions import Decisions
from planner.spec.spec import Spec
from runtime.data.roles import roles_of
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.faults.shared_call import shared_call
from runtime.engine_adapters import EngineAdapters
from runtime.next_tokens.choice import Choice
from runtime.next_tokens.prompts import Feed, Prompts, check_lengths, sequences_of
from runtime.variants import Variant, Variants


@dataclass(frozen=True, slots=True)
class Generated:
    """``tokens``: of each prompt the new ones, with the stop token that ended it; ``sequences``: behind the prompt.
    Tensors of int64 on the CPU. ``is_stopped``: whether a stop token ended it."""

    tokens: tuple[Tensor, ...]
    sequences: tuple[Tensor, ...]
    is_stopped: tuple[bool, ...]


@dataclass
class _Row:
    """One prompt under way. ``number``: its place in the call."""

    number: int
    ids: list[int]
    first: int
    is_stopped: bool = False
    is_done: bool = False


class EngineGeneration(EngineAdapters):
    """What an Engine does to continue texts. The Engine owns all that is named here."""

    spec: Spec
    _variants: Variants
    _decisions: Decisions

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
    ) -> Generated:
        """Continue each prompt by up to ``max_new_tokens`` tokens, or up to one of ``stop``.

        The same call on every rank, with the same prompts; the same answer on every rank. ``prompts``: a dict with the
        input of tokens [n, length] and perhaps an ``attention_mask``, or these tokens, or a list of prompts of any
        lengths. ``temperature`` 0 takes the most probable token; above it tokens are sampled, of the ``top_k`` greatest
        logits and of the most probable ones up to ``top_p`` together. ``seed``: the same tokens on every layout.

        Each token is a whole forward at a planned length: for trying a model out, not for serving it. Raises PlanError
        on every rank for prompts that do not fit the plan, and for a model that is not causal.
        """
        choice, feed = Choice(temperature, top_k, top_p, seed), self._feed()
        ids = self._decisions.id_ranges.get(feed.name, ())
        sequences = sequences_of(prompts, feed.name, ids)
        stops = frozenset((stop,) if isinstance(stop, int) else stop)
        self._check_lengths(feed, sequences, max_new_tokens)
        self._require_equal_calls(repr((sequences, max_new_tokens, choice, sorted(stops))))
        self._ready()
        rows = [_Row(number, list(ids), len(ids)) for number, ids in enumerate(sequences)]
        size = self._variants.layouts[-1].global_size
        for first in range(0, len(rows), size):
            self._continue(feed, rows[first : first + size], max_new_tokens, choice, stops)
        return Generated(
            tuple(torch.tensor(row.ids[row.first :]) for row in rows),
            tuple(torch.tensor(row.ids) for row in rows),
            tuple(row.is_stopped for row in rows),
        )

    # ---- pieces of a call

    def _continue(self, feed: Feed, rows: Sequence[_Row], count: int, choice: Choice, stops: frozenset[int]) -> None:
        """New tokens for as many prompts as a batch holds."""
        for step in range(count):
            under_way = [row for row in rows if not row.is_done]
            if not under_way:
                return
            found = self._next_tokens(feed, under_way, choice, is_first=not step)
            for row, token in zip(under_way, found, strict=True):
                row.ids.append(token)
                row.is_stopped = token in stops
                row.is_done = row.is_stopped or len(row.ids) == row.first + count

    def _next_tokens(self, feed: Feed, rows: Sequence[_Row], choice: Choice, *, is_first: bool) -> list[int]:
        """One token for each of ``rows``; the rest of the batch repeats the first of them."""
        longest = max(len(row.ids) for row in rows)
        layout = next(each for each in self._variants.layouts if feed.length(each) > longest)
        filled = [*rows, *[rows[0]] * (layout.global_size - len(rows))]
        sequences = [row.ids for row in filled]
        batches = [feed.batch(layout, sequences, padding) for padding in feed.paddings()[: 1 + is_first]]
        variant = self._variants.of(batches[0], local=False, any_number=True)
        wanted = feed.wanted(layout, sequences)
        found = [self._rows_of(variant, batch, wanted) for batch in batches]
        (logits, counts), others = found[0], found[-1][0] if is_first else None
        faults = variant.next_rows.faults(logits, counts, others)
        given = [row.number for row in filled], [len(row.ids) for row in filled]
        return variant.next_rows.tokens(logits, counts, faults, choice, *given)[: len(rows)]

    def _rows_of(self, variant: Variant, batch: dict[str, Tensor], wanted: Tensor) -> tuple[Tensor, Tensor]:
        variant.intake.check(batch, local=False)
        one = torch.ones((), dtype=torch.float64, device=self.groups.device)
        counts = [one] * len(self._decisions.terms.denominators)  # the loss is not read
        return variant.next_rows.rows(variant.intake.step(batch, 0, None, local=False, counts=counts), wanted)

    def _feed(self) -> Feed:
        names = self._variants.longest.layout.inputs
        return Feed(roles_of(names, self.spec.data.inputs), self._decisions.scored)

    def _check_lengths(self, feed: Feed, sequences: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        check_lengths(sequences, max_new_tokens, max(feed.length(layout) for layout in self._variants.layouts))

    def _require_equal_calls(self, call: str) -> None:
        """Raise PlanError on every rank if ranks ask for other things: they would wait for each other."""
        if self.groups.world is None:
            return
        asked = all_gather_json(self.groups, hashlib.sha256(call.encode()).hexdigest())
        odd = [rank for rank, each in enumerate(asked) if each != asked[0]]
        if odd:
            what = f"rank {odd[0]} calls generate with other prompts or options than rank 0"
            raise PlanError(what, where="generate", fix="give every rank the same")
