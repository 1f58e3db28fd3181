"""What ranks run to score a batch and a text, and the same by definition in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from passes.partition.loss.scored import is_over_classes
from passes.types.conversions import ALL_GATHER, ALL_REDUCE, CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.collectives import FIGURES, WIDE, check_scored
from runtime import Engine
from runtime.data.tokens import WORD, Tokenization, Tokens
from runtime.engine.log_probs import Scores
from runtime.evaluation.evaluate import Cloze, Perplexity, cloze, perplexity
from tests.tools.jobs import Batches
from tests.tools.limits import HANG_SECONDS


def scores_of(plan: Any, batches: Batches) -> list[tuple[Scores, float]]:
    """Of the first batch, and its loss; and again after steps on it, as many as an engine takes to use its graphs."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        before = engine.score(batches[0]), engine.evaluate(batches[0])
        for _ in range(3):
            engine.train_step(batches[0])
        return [before, (engine.score(batches[0]), engine.evaluate(batches[0]))]


@contextmanager
def sums_over_all(engine: Engine) -> Iterator[list[int]]:
    """The bytes of each sum over all ranks, while it is open."""
    seen, whole = list[int](), dist.all_reduce

    def noted(x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        if group is engine.groups.world:
            seen.append(x.nbytes)
        return whole(x, *args, group=group, **options)

    dist.all_reduce = noted
    yield seen
    dist.all_reduce = whole


def exchanged_for_scores(plan: Any, batches: Batches) -> tuple[int, int]:
    """Bytes that all ranks sum over the world for the scores of a batch, as seen and as planned."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.score(batches[0])
        with sums_over_all(engine) as seen:
            engine.score(batches[0])
    rows = score_rows(plan.to_run()[0], len(batches[0]["labels"]))
    return sum(seen), sum(row.bytes for row in rows if row.axis == "world")


def text(vocabulary: int, num_documents: int = 7, seed: int = 0) -> Tokens:
    """Documents of 2 to 30 ids, each closed by the id 0; a word begins at the first, and at a third of the rest."""
    random = np.random.default_rng(seed)
    documents = [random.integers(1, vocabulary, random.integers(2, 31)) for _ in range(num_documents)]
    marks = [(random.random(len(ids)) < 0.3).astype(np.uint8) * WORD for ids in documents]
    for mark in marks:
        mark[0] = WORD
    words = np.array([int(mark.sum()) for mark in marks])
    ends = np.cumsum([len(ids) + 1 for ids in documents])
    closed = [np.append(ids, 0) for ids in documents], [np.append(mark, np.uint8(0)) for mark in marks]
    how = Tokenization("by hand", vocabulary, {"end": 0})
    return Tokens(np.concatenate(closed[0]), ends, np.concatenate(closed[1]), words, how, "by hand", "")


def measured(plan: Any, batches: Batches, tokens: Tokens, stride: int) -> tuple[Perplexity, Cloze]:
    """Of the model as it is: what an evaluation finds on the text."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        return perplexity(engine, tokens, stride=stride), cloze(engine, tokens)


class Alone:
    """The same by definition, in one process: the next token's distribution of the unmodified model, one at a time.

    ``logits(ids [1, n]) -> [1, n, v]``; ``span``: how many tokens a window holds, the predicted one included.
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], tokens: Tokens, span: int) -> None:
        self.logits, self.tokens, self.span = logits, tokens, span

    @torch.no_grad()
    def next_of(self, start: int, stop: int) -> Tensor:
        """log P [v] of the token at ``stop`` behind those from ``start``."""
        ids = torch.from_numpy(self.tokens.ids[start:stop].astype(np.int64))
        return self.logits(ids[None])[0, -1].double().log_softmax(-1)

    def perplexity(self, stride: int) -> float:
        """Windows stand at 0, stride, 2·stride …, the last at the end; each token is of the first that has it."""
        num, total = len(self.tokens.ids), 0.0
        starts = [0]
        while starts[-1] + self.span < num:
            starts.append(min(starts[-1] + stride, num - self.span))
        for token in range(1, num):
            start = next(start for start in starts if token < start + self.span)
            total += float(self.next_of(start, token)[self.tokens.ids[token]])
        return float(np.exp(-total / self.tokens.words.sum()))

    def last_words(self) -> Iterator[tuple[int, range]]:
        """Of each document that has two words: where its window begins, and the tokens of the last word."""
        first = 0
        for end in self.tokens.ends.tolist():
            words = first + np.flatnonzero(self.tokens.marks[first : end - 1])
            begin, first = max(first, end - 1 - self.span), end
            if len(words) > 1 and words[-1] > begin:
                yield begin, range(words[-1], end - 1)

    def tell_some(self) -> None:
        """Every other last word becomes what the model would say; of every fourth but its last token."""
        for number, (begin, word) in enumerate(self.last_words()):
            for token in word if number % 2 == 0 else ():
                self.tokens.ids[token] = self.top(begin, token) + (number % 4 == 2 and token == word[-1])

    def top(self, start: int, stop: int) -> int:
        return int(self.next_of(start, stop)[:-1].argmax())

    def right(self) -> list[bool]:
        """Of each passage: whether all tokens of the last word are the most probable ones."""
        return [
            all(int(self.next_of(begin, t).argmax()) == self.tokens.ids[t] for t in word)
            for begin, word in self.last_words()
        ]


# ---- The collectives of scores and of next tokens, beside those of a forward; a plan lists those of training alone
#
# scores         over tp, a microbatch      per token the maximum, then three scalars    if logits are cut over classes
#                over all ranks, a batch    log P, top and count of every label
# next tokens    over tp, a microbatch      one row of logits of each sequence           if logits are cut over classes
#                over all ranks, a forward  token, count and fault of each sequence


def score_rows(decisions: Decisions, num_sequences: int) -> list[CollectivePlan]:
    """One row for each exchange; ``num_sequences`` are those of the global batch."""
    found = []
    for logits, num_classes, _ in _over_classes(decisions):
        num_tokens = logits.numel() // num_classes
        for size in (max(4, logits.element_size()), FIGURES * WIDE):
            found.append(_over_tp(decisions, ALL_REDUCE, size * num_tokens))
    return found + _over_all(decisions, num_sequences * prod(decisions.batch_inputs[decisions.scored.key][0]))


def next_token_rows(decisions: Decisions, num_sequences: int) -> list[CollectivePlan]:
    """One row for each exchange; ``num_sequences`` are those of the global batch."""
    (labels,) = (n for n, key in decisions.program.inputs.items() if key == decisions.scored.key)
    micro, found = len(decisions.program.node(labels).meta["val"]), []
    for logits, num_classes, padding in _over_classes(decisions):
        columns = ceil((num_classes + padding) / decisions.mesh.tp) * decisions.mesh.tp
        found.append(_over_tp(decisions, ALL_GATHER, max(4, logits.element_size()) * micro * columns))
    return found + _over_all(decisions, num_sequences)


def _over_classes(decisions: Decisions) -> Iterator[tuple]:
    """Logits that are cut over the classes, how many classes there are, and their padding."""
    check_scored(decisions)
    for pick in decisions.scored.picks:
        node = decisions.program.node(pick.node)
        if is_over_classes(decisions.placements, node, pick):
            padding = decisions.placements.wanted(node, 0).padding
            yield node.all_input_nodes[0].meta["val"], pick.num_classes, padding


def _over_tp(decisions: Decisions, kind: str, size: int) -> CollectivePlan:
    return CollectivePlan(kind, "tp", "forward", "", size, 1, "microbatch", decisions.stages.num_stages - 1)


def _over_all(decisions: Decisions, count: int) -> list[CollectivePlan]:
    key, size = decisions.scored.key, FIGURES * WIDE * count
    return [CollectivePlan(ALL_REDUCE, "world", "step", key, size, 1, "step")] if decisions.mesh.world_size > 1 else []
