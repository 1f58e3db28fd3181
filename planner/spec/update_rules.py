"""The update rules: the values that each keeps of an element between updates, and the keys of the spec that it reads.

adamw     decoupled weight decay            adam, adagrad, sgd   weight decay is added to the gradient
lion      the sign of a mean of gradients   sgd                  keeps nothing without momentum
schedule_free_adamw   gradients at a point between the steps and their mean, which is evaluated; adamw otherwise
muon      the orthogonal factor of a mean of gradients, for each matrix; adamw for all that is no hidden matrix
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.spec.torch_optimizers import PREFIX, Options, tried_moments


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """``moments``: kinds of values of an element. ``keys``: of the spec's section, beside lr and weight_decay.

    ``for_others``: the rule of parameters that are no hidden matrices, if this one is for matrices alone. ``of_torch``:
    the class of torch.optim that computes the same, with which ``verify`` compares it. ``evaluates_mean``: whether the
    weights that it trains are not those to evaluate.
    """

    moments: tuple[str, ...]
    keys: tuple[str, ...] = ()
    for_others: str = ""
    of_torch: str = ""
    evaluates_mean: bool = False


UPDATE_RULES = {
    "adamw": UpdateRule(("exp_avg", "exp_avg_sq"), ("betas", "eps"), of_torch="AdamW"),
    "adam": UpdateRule(("exp_avg", "exp_avg_sq"), ("betas", "eps"), of_torch="Adam"),
    "sgd": UpdateRule(("momentum_buffer",), ("momentum", "nesterov"), of_torch="SGD"),
    "lion": UpdateRule(("exp_avg",), ("betas",)),
    "adagrad": UpdateRule(("sum",), ("eps",), of_torch="Adagrad"),
    "schedule_free_adamw": UpdateRule(("exp_avg_sq", "distance"), ("betas", "eps"), evaluates_mean=True),
    "muon": UpdateRule(("momentum_buffer",), ("momentum", "nesterov", "adjust_lr", "split"), for_others="adamw"),
}
MATRIX_RULES = frozenset(name for name, rule in UPDATE_RULES.items() if rule.for_others)
MEAN_RULES = frozenset(name for name, rule in UPDATE_RULES.items() if rule.evaluates_mean)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = {"sgd": (0.0, False), "muon": (0.95, True)}  # momentum and nesterov, if the spec leaves them out


def moments_of(rule: str, optimizer: Any) -> tuple[str, ...]:
    """The moments of a rule, under the spec's section.

    Raises PlanError for one of torch.optim that is refused.
    """
    if rule.startswith(PREFIX):
        return tried_moments(rule, options_of(optimizer))
    momentum, _ = momentum_of(optimizer)
    return () if rule == "sgd" and not momentum else UPDATE_RULES[rule].moments


def momentum_of(optimizer: Any) -> tuple[float, bool]:
    """Momentum and nesterov of the spec's section."""
    momentum, nesterov = MOMENTUM.get(optimizer.name, (0.0, False))
    given = optimizer.momentum, optimizer.nesterov
    return momentum if given[0] is None else given[0], nesterov if given[1] is None else given[1]


def options_of(optimizer: Any) -> Options:
    """The arguments of an optimizer of torch.optim, as the spec's section has them."""
    pairs = sorted(optimizer.options.items())
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in pairs)


def keys_read(rule: str) -> frozenset[str]:
    """The keys that a run with this rule reads: those of the rule for other parameters too."""
    if rule.startswith(PREFIX):
        return frozenset({"options"})
    found = UPDATE_RULES[rule]
    return frozenset(found.keys) | (keys_read(found.for_others) if found.for_others else frozenset())
