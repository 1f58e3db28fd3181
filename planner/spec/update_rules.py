"""The update rules: the values that each keeps of an element between updates, and the keys of the spec that it reads.

adamw     decoupled weight decay            adam, adagrad, sgd   weight decay is added to the gradient
lion      the sign of a mean of gradients   sgd                  keeps nothing without momentum
schedule_free_adamw   gradients at a point between the steps and their mean, which is evaluated; adamw otherwise
muon      the orthogonal factor of a mean of gradients, for each matrix; adamw for all that is no hidden matrix

Optimizers of ``torch.optim`` are taken by name, if they update each element by itself: tried on a few values.

    optimizer: {name: torch.optim:RMSprop, lr: 1.0e-4, options: {alpha: 0.9}}

Its moments are the tensors that it keeps of a parameter's shape. It is refused if a shard could not hold them: the
update of a part is not the part of the update, it keeps other values, or begins with others than zero.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError, first_line

NEWTON_SCHULZ_STEPS = 5
MOMENTUM = {"sgd": (0.0, False), "muon": (0.95, True)}  # momentum and nesterov, if the spec leaves them out
PREFIX = "torch.optim:"
_CLASSES = {name: of for name, of in vars(torch.optim).items() if isinstance(of, type) and name != "Optimizer"}
STEPS = 3
Options = tuple[tuple[str, Any], ...]


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


def moments_of(rule: str, optimizer: Any) -> tuple[str, ...]:
    """Return the moments of a rule, under the spec's section.

    Raises PlanError for one of torch.optim that is refused.
    """
    if rule.startswith(PREFIX):
        return tried_moments(rule, options_of(optimizer))
    momentum, _ = momentum_of(optimizer)
    return () if rule == "sgd" and not momentum else UPDATE_RULES[rule].moments


def momentum_of(optimizer: Any) -> tuple[float, bool]:
    momentum, nesterov = MOMENTUM.get(optimizer.name, (0.0, False))
    given = optimizer.momentum, optimizer.nesterov
    return momentum if given[0] is None else given[0], nesterov if given[1] is None else given[1]


def options_of(optimizer: Any) -> Options:
    """Return the arguments of an optimizer of torch.optim in the spec's section."""
    pairs = sorted(optimizer.options.items())
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in pairs)


def keys_read(rule: str) -> frozenset[str]:
    """Return the keys that a run with this rule reads, including those of the rule for other parameters."""
    if rule.startswith(PREFIX):
        return frozenset({"options"})
    found = UPDATE_RULES[rule]
    return frozenset(found.keys) | (keys_read(found.for_others) if found.for_others else frozenset())


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of torch.optim. Raises PlanError if there is none of this name."""
    wanted = name.removeprefix(PREFIX)
    if wanted in _CLASSES:
        return _CLASSES[wanted]
    nearest = difflib.get_close_matches(wanted, _CLASSES, n=1)
    hint = f"did you mean {PREFIX}{nearest[0]}? " if nearest else ""
    raise PlanError(f"torch.optim has no {wanted}", where="optimizer.name", fix=f"{hint}name one of its classes")


def class_in_any_case(name: str) -> str | None:
    """Return the name of a class of torch.optim in the spec, for ``rmsprop`` in any case; None if there is none."""
    return next((PREFIX + known for known in _CLASSES if known.lower() == name.lower()), None)


def arguments_of(name: str, weight_decay: float, options: Options) -> dict[str, Any]:
    """Return the keyword arguments of the class, beside lr. ``capturable`` keeps its count of updates on the device."""
    known = inspect.signature(class_of(name)).parameters
    decay = {"weight_decay": weight_decay} if "weight_decay" in known else {}
    return decay | dict(options)


@lru_cache(64)
def tried_moments(name: str, options: Options) -> tuple[str, ...]:
    """Return the values that it keeps of each element. Raises PlanError if it is not element-wise."""
    whole = _Trial(name, options, slice(None))
    whole.run()
    others = [n for n, v in whole.state.items() if n not in ("step", *whole.moments) and v is not None]
    if others:
        raise _refused(name, f"keeps {others[0]}, a value that is not of an element")
    for part in (slice(0, 3), slice(3, 8)):
        piece = _Trial(name, options, part)
        piece.begin(whole.moments)
        piece.run()
        if not torch.equal(piece.value, whole.value[part]):
            raise _refused(name, "updates an element by the values of others, or begins with moments other than zero")
    return whole.moments


class _Trial:
    """Some steps on a part of 8 values."""

    def __init__(self, name: str, options: Options, part: slice) -> None:
        draw = torch.Generator().manual_seed(0)
        values, self._gradients = torch.randn(8, generator=draw), torch.randn(STEPS, 8, generator=draw)
        self.name, self.value, self._part = name, values[part].clone(), part
        made: Any = class_of(name)
        try:
            self._optimizer = made([self.value], lr=0.1, **arguments_of(name, 0.01, options))
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"{name} does not take these options: {first_line(error)}",
                where="optimizer.options",
                fix=f"write arguments of torch.optim.{name.removeprefix(PREFIX)}",
            ) from None

    @property
    def state(self) -> Mapping[str, Any]:
        return self._optimizer.state[self.value]

    @property
    def moments(self) -> tuple[str, ...]:
        return tuple(n for n, v in self.state.items() if isinstance(v, Tensor) and v.shape == self.value.shape)

    def begin(self, moments: tuple[str, ...]) -> None:
        zeros = {kind: torch.zeros_like(self.value) for kind in moments}
        self._optimizer.state[self.value] = {"step": torch.zeros(()), **zeros}

    def run(self) -> None:
        try:
            for gradient in self._gradients:
                self.value.grad = gradient[self._part].clone()
                self._optimizer.step()
        except Exception as error:
            raise _refused(self.name, f"cannot update a flat tensor: {first_line(error)}") from None


def _refused(name: str, what: str) -> PlanError:
    return PlanError(
        f"{name} {what}: it cannot run on the shards of ZeRO-1",
        where="optimizer.name",
        fix="choose adamw, muon, or a class that updates each element by itself, such as torch.optim:RMSprop",
    )
