"""The section ``optimizer``: the update rule, its settings, and those of groups of parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from passes.errors import PlanError, SpecError
from planner.spec.fields import (
    AUTO,
    MOST_NAMES,
    Auto,
    Flag,
    Fraction,
    Name,
    NotNegative,
    NullIsNone,
    Number,
    Positive,
    Section,
    Size,
    Word,
    key,
)
from planner.spec.learning_rate import LearningRateSpec
from planner.spec.messages import describe_value, not_read, wrong
from planner.spec.update_rules import (
    MEAN_RULES,
    PREFIX,
    UPDATE_RULES,
    class_in_any_case,
    keys_read,
    moments_of,
    momentum_of,
    tried_moments,
)

if TYPE_CHECKING:
    Rule = str
else:
    Rule = Literal[tuple(UPDATE_RULES)]  # pydantic reads it

_RULES = {"anyOf": [{"enum": list(UPDATE_RULES)}, {"type": "string", "pattern": f"^{PREFIX}."}]}


def _rule(value: Any) -> str:
    if isinstance(value, str) and (value in UPDATE_RULES or value.startswith(PREFIX)):
        return value
    meant = _meant(str(value)[:100])
    if meant.startswith(PREFIX):
        try:
            tried_moments(meant, ())
        except PlanError as error:
            raise SpecError(f"cannot be {describe_value(value)}: {error.what}", fix=error.fix) from None
    hint = f"did you mean '{meant}'? " if meant else ""
    fix = f"{hint}choose one of: {', '.join(UPDATE_RULES)}; or name a class of torch: {PREFIX}RMSprop"
    raise SpecError(f"cannot be {describe_value(value)}", fix=fix)


def _meant(name: str) -> str:
    """Return a rule of that name in any case, a class of torch, or the nearest rule; "" if there is none."""
    if name.lower() in UPDATE_RULES:
        return name.lower()
    nearest = difflib.get_close_matches(name, UPDATE_RULES, n=1)
    return class_in_any_case(name) or next(iter(nearest), "")


RuleOrClass = Annotated[str, BeforeValidator(_rule), WithJsonSchema(_RULES)]


class GroupSpec(Section):
    """Settings of some parameters, in place of the optimizer's own."""

    name: Rule | None = key(None, "update rule; null: the optimizer's")
    lr: NotNegative | None = key(None, "learning rate after the warm-up, scaled by the schedule; null: the optimizer's")
    betas: tuple[Fraction, Fraction] | None = key(None, "decay rates of the moments; null: the optimizer's")
    eps: Positive | None = key(None, "added to the denominator of the update; null: the optimizer's")
    weight_decay: NotNegative | None = key(None, "as the optimizer's; null: the same")


class OptimizerSpec(Section):
    name: RuleOrClass = key(
        "adamw",
        "adamw | adam | sgd | lion | adagrad | schedule_free_adamw | muon (of hidden matrices; adamw of "
        "all other parameters), or an element-wise class of torch: torch.optim:RMSprop",
    )
    lr: NotNegative = key(1.5e-4, "learning rate after the warm-up")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.95), "decay rates of the first and second moments")
    eps: Positive = key(1.0e-8, "added to the denominator of the update")
    weight_decay: NotNegative = key(0.01, "decoupled for adamw, lion and muon; for others added to the gradient")
    momentum: Fraction | None = key(None, "null: 0 for sgd, 0.95 for muon")
    nesterov: Flag | None = key(None, "for sgd with momentum, and muon; null: false for sgd, true for muon")
    options: dict[Name, Flag | Number | list[Number]] = key(
        {}, "arguments of a class of torch, beside lr and weight_decay: {alpha: 0.9}"
    )
    adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "for muon, of a matrix [a, b]: match_rms_adamw: lr · 0.2 · √max(a, b), for an lr that suits adamw too; "
        "original: lr · √max(1, a / b)",
    )
    split: Literal["parts", "heads"] = key(
        "parts",
        "for muon: parts: a fused weight is a matrix for each of q, k and v; heads: one for each head of these, fused "
        "or not",
    )
    no_decay: Annotated[Literal["none", "vectors"], NullIsNone] = key(
        "none", "parameters without weight decay: none | vectors, such as biases and the weights of norms"
    )
    groups: Annotated[dict[Name, GroupSpec], Field(max_length=MOST_NAMES)] = key(
        {}, "glob over dotted names of parameters: {name, lr, betas, eps, weight_decay} of these, in place of the above"
    )
    zero: Annotated[Literal[0, 1, 2, 3] | Auto, Word] = key(
        1,
        "what each replica keeps a shard of: 1: the optimizer state; 2: the gradients too; 3: the weights too, which "
        "are gathered block by block; 0: nothing; may be auto if an axis is auto",
    )
    reshard: Flag | Auto | Size = key(
        AUTO,
        "with zero 3: true: free the weights of a block after its last use; false: gather them once a step; a number: "
        "so many blocks of each stage, the last ones, once a step; auto: false if the devices of the cluster have the "
        "memory",
    )
    shard_group: Size | None = key(
        None, "ranks within which parameters are in shards, with copies beyond (HSDP); null: all that share them"
    )
    clip_grad_norm: Positive | None = key(1.0, "maximum global gradient norm; null: no clipping")
    alignment: Annotated[Literal["nccl", "none"], NullIsNone] = key(
        "nccl", "nccl: buckets padded for the network; none: no padding"
    )
    bucket_size: Size | None = key(None, "elements per gradient bucket; null: max(40 million, 1 million · dp)")
    ema: Fraction | None = key(
        None, "decay of an exponential moving average of the weights, saved with them; null: none"
    )
    schedule: LearningRateSpec = key(LearningRateSpec(), "learning-rate schedule")

    @property
    def planned_zero(self) -> int:
        """Return ``zero`` of a decided layout."""
        assert isinstance(self.zero, int), "a search replaces auto before anything is sharded"
        return self.zero

    @property
    def rules(self) -> frozenset[str]:
        """Return the names of the update rules of this run, including those of groups."""
        return frozenset({self.name, *(group.name for group in self.groups.values() if group.name is not None)})

    def problems(self) -> Iterator[PlanError]:
        yield from self._keys_of_others()
        if MEAN_RULES & self.rules:
            yield from self._beside_a_mean()
        try:
            if self.name.startswith(PREFIX):
                moments_of(self.name, self)
        except PlanError as error:
            yield SpecError(error.what, where=error.where, fix=error.fix)
        if not self.lr and (pattern := next((p for p, group in self.groups.items() if group.lr), None)) is not None:
            what = f" is not followed: a group's rate is in proportion to optimizer.lr = {self.lr:g}"
            fix = "set optimizer.lr to it, and groups with lr: 0 for parameters that stay; or freeze these in the model"
            yield wrong(f"optimizer.groups.{pattern}.lr", what, fix)
        if self.schedule.min_lr > self.lr:
            what = f" = {self.schedule.min_lr:g} is more than optimizer.lr = {self.lr:g}"
            yield wrong("optimizer.schedule.min_lr", what, "choose a smaller min_lr")

    def _beside_a_mean(self) -> Iterator[PlanError]:
        """Yield keys that a schedule-free rule replaces."""
        (rule,) = MEAN_RULES
        if self.schedule.kind != "constant":
            yield wrong("optimizer.schedule.kind", f": {rule} has no schedule beside a warm-up", "set kind: constant")
        if self.ema is not None:
            yield wrong("optimizer.ema", f": {rule} has a mean of its own", "remove it")

    def _keys_of_others(self) -> Iterator[PlanError]:
        """Yield keys that no update rule of the run reads, if they differ from their defaults."""
        read = set[str]().union(*(keys_read(rule) for rule in self.rules))
        for name in dict.fromkeys(("options", *(name for rule in UPDATE_RULES.values() for name in rule.keys))):
            if name not in read and getattr(self, name) != type(self).model_fields[name].default:
                yield not_read(f"optimizer.{name}", self.name)
            for pattern, group in self.groups.items():
                rule = group.name or self.name
                if name not in keys_read(rule) and getattr(group, name, None) is not None:
                    yield not_read(f"optimizer.groups.{pattern}.{name}", rule)
        momentum, nesterov = momentum_of(self)
        if nesterov and not momentum:
            yield wrong("optimizer.nesterov", " needs momentum", "set optimizer.momentum: 0.9")
