"""The update rule and settings of each parameter, and the matrices in a weight that a rule such as muon updates whole.

A parameter has the settings of the section ``optimizer``, changed by the groups with a glob that matches its name.

    optimizer: {lr: 1.0e-4, weight_decay: 0.1, no_decay: vectors, groups: {"lm_head*": {lr: 3.0e-5}}}

A group changes only the keys that it has. Its learning rate stays in proportion to the scheduled one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from passes.errors import PlanError
from passes.program.matrices import Matrices, find_matrices
from passes.program.program import Program
from planner.spec.optimizer import OptimizerSpec
from planner.spec.update_rules import MATRIX_RULES, UPDATE_RULES, Options, momentum_of, options_of

KEYS = ("rule", "lr", "betas", "eps", "weight_decay")
_OF_KEY = {"name": "rule"}


class Named(Protocol):
    """A row of the plan's parameters."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def matrices(self) -> Matrices | None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one parameter. ``lr``: after the ``warmup`` (steps). ``adjust_lr``: of muon; ``options``: of a
    class of torch.optim."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float = 0.0
    nesterov: bool = False
    adjust_lr: str = "match_rms_adamw"
    rule: str = "adamw"
    options: Options = ()
    warmup: int = 0

    def factor(self, base: Settings) -> float:
        """Return the parameter's learning rate as a multiple of the scheduled one."""
        return self.lr / base.lr if base.lr else 1.0

    def told(self, base: Settings) -> str:
        """Return the settings that differ from the section's, in words; "" if none does."""
        changed = [key for key in KEYS if getattr(self, key) != getattr(base, key)]
        return ", ".join(f"{key} {_text(getattr(self, key))}" for key in changed)


def base_of(optimizer: OptimizerSpec) -> Settings:
    """Return the settings of the section."""
    o, warmup = optimizer, int(optimizer.schedule.of_run(0).warmup)
    return Settings(o.lr, o.betas, o.eps, o.weight_decay, *momentum_of(o), o.adjust_lr, o.name, options_of(o), warmup)


def settings_of(optimizer: OptimizerSpec, parameters: Iterable[Named]) -> dict[str, Settings]:
    """Return name → settings of the parameters that differ from the section.

    Raises PlanError for a glob that matches no parameter, and for two that give one parameter different values.
    """
    base, unused, own = base_of(optimizer), dict.fromkeys(optimizer.groups), dict[str, Settings]()
    if not unused and optimizer.no_decay == "none" and optimizer.name not in MATRIX_RULES:
        return {}
    names: list[str] = []
    for row in parameters:
        names += (row.name, *row.aliases)
        changed = _changed(row, optimizer, unused)
        if optimizer.no_decay == "vectors" and len(row.shape) < 2:
            changed = {"weight_decay": 0.0, **changed}
        settings = _of_its_shape(row, replace(base, **changed), is_asked="rule" in changed)
        if settings != base:
            own[row.name] = settings
    for pattern in unused:
        raise _no_parameter(pattern, names)
    return own


def _changed(row: Named, optimizer: OptimizerSpec, unused: dict[str, None]) -> Mapping[str, Any]:
    """Return the settings that groups change for a parameter, and remove these groups from ``unused``."""
    changed: dict[str, Any] = {}
    by: dict[str, str] = {}
    for pattern, group in optimizer.groups.items():
        if not any(fnmatchcase(name, pattern) for name in (row.name, *row.aliases)):
            continue
        unused.pop(pattern, None)
        for key, value in ((_OF_KEY.get(key, key), value) for key, value in group):
            if value is not None and changed.setdefault(key, value) != value:
                raise PlanError(
                    f"optimizer.groups: '{by[key]}' and '{pattern}' give {row.name} different values of {key}",
                    where=f"optimizer.groups.{pattern}",
                    fix="make the globs narrower, so that only one of them matches this parameter",
                )
            if value is not None:
                by.setdefault(key, pattern)
    return changed


def _of_its_shape(row: Named, settings: Settings, *, is_asked: bool) -> Settings:
    """Replace a rule of matrices that cannot update this parameter; raise PlanError if a group asks for it."""
    if settings.rule not in MATRIX_RULES or row.matrices is not None:
        return settings
    if is_asked:
        raise PlanError(
            f"optimizer.groups: {settings.rule} is for hidden matrices, and {row.name} {list(row.shape)} is not the "
            "weight of a product between hidden activations",
            where="optimizer.groups",
            fix="make the glob narrower, or choose another rule",
        )
    return replace(settings, rule=UPDATE_RULES[settings.rule].for_others)


def _no_parameter(pattern: str, names: list[str]) -> PlanError:
    parts = dict.fromkeys([*names, *(part for name in names for part in name.split("."))])
    nearest = difflib.get_close_matches(pattern.replace("*", "").strip("."), parts, n=1, cutoff=0.0)
    like = next((name for name in names if nearest and nearest[0] in name), "")
    fix = f"name parameters of the model, such as {like}" if like else "remove it"
    where = f"optimizer.groups.{pattern}"
    return PlanError(f"optimizer.groups: '{pattern}' names no parameter", where=where, fix=fix)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else " ".join(f"{part:g}" for part in value)


@dataclass(frozen=True)
class UpdateRules:
    """``section``: the rule of the spec's section; ``others``: fqn → rule of the parameters with another one.

    ``matrices``: fqn → matrices of each hidden weight; empty if no rule of the run updates matrices.
    """

    section: str = "adamw"
    others: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Matrices] = field(default_factory=dict)

    def of(self, fqn: str) -> str:
        return self.others.get(fqn, self.section)

    def matrices_of(self, fqn: str) -> Matrices | None:
        """Return the matrices of a parameter; None if it is updated element by element."""
        return self.matrices.get(fqn) if self.of(fqn) in MATRIX_RULES else None


class _Row(NamedTuple):
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    matrices: Matrices | None


def aliases_of(program: Program) -> dict[str, tuple[str, ...]]:
    """Return first name → other names of each parameter with several names."""
    aliases: dict[str, tuple[str, ...]] = {}
    for alias, first in program.aliases.items():
        aliases[first] = (*aliases.get(first, ()), alias)
    return aliases


def decide_rules(optimizer: OptimizerSpec, program: Program) -> UpdateRules:
    """Decide the rule of each parameter. Raises PlanError for groups that conflict, match nothing, or do not fit."""
    asked = {optimizer.name, *(group.name for group in optimizer.groups.values())}
    by_heads = optimizer.split == "heads"
    matrices = {}
    if asked & MATRIX_RULES:
        matrices = find_matrices(program.graph.graph, program.parameters, by_heads=by_heads)
    aliases = aliases_of(program)
    rows = [
        _Row(fqn, tuple(program.node(name).meta["val"].shape), aliases.get(fqn, ()), matrices.get(fqn))
        for name, fqn in program.parameters.items()
    ]
    own = settings_of(optimizer, rows)
    others = {name: settings.rule for name, settings in own.items() if settings.rule != optimizer.name}
    return UpdateRules(optimizer.name, others, matrices)
