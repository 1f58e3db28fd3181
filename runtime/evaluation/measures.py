"""Results of an evaluation.

perplexity       exp(−(1/T_o) Σ log P(token))       T_o: words of the text before tokenization
cloze accuracy   share of passages in which every token of the last word is the arg max
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``log_probability``: sum over the ``num_scored`` tokens, in nats; ``num_ignored``: that the loss skips by value.

    ``num_original``: tokens of the original text, which the sum is divided by; ``counted``: how they were counted.
    """

    log_probability: float
    num_scored: int
    num_ignored: int
    num_original: int
    counted: str
    num_windows: int
    length: int
    stride: int

    @property
    def perplexity(self) -> float:
        return _exp(-self.log_probability / self.num_original)

    @property
    def of_tokens(self) -> float:
        """The same over the model's own tokens; of another tokenizer it says something else."""
        return _exp(-self.log_probability / max(1, self.num_scored))

    def to_dict(self) -> dict[str, Any]:
        found = {"perplexity": self.perplexity, "perplexity_of_tokens": self.of_tokens}
        return {k: v if math.isfinite(v) else None for k, v in found.items()} | asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("perplexity", f"{self.perplexity:.6g}"),
            ("  over", f"{self.num_original:,} {self.counted}"),
            ("perplexity of its own tokens", f"{self.of_tokens:.6g}"),
            ("  over", f"{self.num_scored:,} tokens" + _beside(self.num_ignored, "that the loss ignores")),
            ("sum of log P", f"{self.log_probability:.6f} nats"),
            ("windows", f"{self.num_windows:,} of {self.length} tokens, stride {self.stride}"),
        ]


@dataclass(frozen=True, slots=True)
class Cloze:
    """``num_cut``: passages with a truncated beginning. ``left_out``: reason → number of documents."""

    num_right: int
    num_passages: int
    num_cut: int
    left_out: Mapping[str, int]
    length: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_passages

    def to_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, **asdict(self), "left_out": dict(self.left_out)}

    def rows(self) -> list[tuple[str, str]]:
        found = [
            ("accuracy", f"{100 * self.accuracy:.2f} %"),
            ("passages", f"{self.num_passages:,}; the last word of {self.num_right:,} is right"),
            ("cut to a window", f"{self.num_cut:,}, to their last {self.length} tokens"),
        ]
        return [*found, *(("left out", f"{number:,}: {reason}") for reason, number in self.left_out.items())]


def _exp(x: float) -> float:
    return math.exp(x) if x < math.log(float.fromhex("0x1.fffffffffffffp+1023")) else math.inf


def _beside(number: int, what: str) -> str:
    return f", beside {number:,} {what}" if number else ""
