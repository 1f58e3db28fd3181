"""The element-wise update rules: what each keeps of an element between updates, and the keys of the spec that it reads.

adamw     decoupled weight decay            adam, adagrad, sgd   weight decay is added to the gradient
lion      the sign of a mean of gradients   sgd                  keeps nothing without momentum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """``moments``: kinds of values of an element. ``keys``: of the spec's section, beside lr and weight_decay."""

    moments: tuple[str, ...]
    keys: tuple[str, ...] = ()


UPDATE_RULES = {
    "adamw": UpdateRule(("exp_avg", "exp_avg_sq"), ("betas", "eps")),
    "adam": UpdateRule(("exp_avg", "exp_avg_sq"), ("betas", "eps")),
    "sgd": UpdateRule(("momentum_buffer",), ("momentum", "nesterov")),
    "lion": UpdateRule(("exp_avg",), ("betas",)),
    "adagrad": UpdateRule(("sum",), ("eps",)),
}


def moments_of(optimizer: Any) -> tuple[str, ...]:
    """Of the spec's section."""
    return () if optimizer.name == "sgd" and not optimizer.momentum else UPDATE_RULES[optimizer.name].moments
