"""A model of the user's own and the spec of its cases: the keys that the spec writes stay, all others are drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from planner import plan
from planner.capture.model.reference import load_model
from planner.spec.fields import AUTO
from planner.spec.lines import read_yaml
from planner.spec.spec import Spec
from runtime.fuzz.case import Model
from runtime.fuzz.fields import Choices
from runtime.fuzz.fitting import Facts, world_size
from runtime.fuzz.forks import in_fork
from runtime.fuzz.specs import AXES, FIELDS

_NO_PART = ("cluster", "devices", "data")  # of a step
_OF_DRAWN_MODELS = {
    "tensor_parallel.overrides": ("none",),
    "optimizer.groups": ("none",),
    "recompute": ("none", "full", "selective"),
    "blocks recomputed": ("all",),
}
CAPTURE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class OwnModel:
    """``reference``: MODEL of the command line. ``base``: the spec's values except those that it leaves to auto."""

    reference: str
    base: dict[str, Any]
    num_blocks: int
    has_experts: bool

    @classmethod
    def read(cls, reference: str, spec: Path, most_ranks: int) -> OwnModel:
        """Raises PlanError: a spec that is none, that leaves nothing to draw, or a model that cannot be captured."""
        checked = Spec.load(spec, {"mesh": AUTO})
        checked.require_inputs()
        values, _ = read_yaml(spec)
        base = {name: value for name, value in _without_auto(values).items() if name not in _NO_PART}
        own = cls(reference, base, 1, False)
        _check_axes(checked, own, most_ranks)
        num_blocks, has_experts = in_fork(_captured, own, timeout_seconds=CAPTURE_SECONDS)
        return cls(reference, base, num_blocks, has_experts)

    @property
    def facts(self) -> Facts:
        return Facts(self.num_blocks, self.has_experts, self.base["batch"]["global"])

    @property
    def pinned(self) -> Choices:
        """The fields that the spec writes."""
        found = {name: value for name in FIELDS if (value := _at(self.base, name)) is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}

    @property
    def options(self) -> dict[str, tuple[Any, ...]]:
        pinned = self.pinned
        found = FIELDS | _OF_DRAWN_MODELS | {"microbatches": (None,)}
        return {name: (pinned[name],) if name in pinned else values for name, values in found.items()}

    def build(self, seed: int) -> nn.Module:
        return load_model(self.reference, materialize=True, seed=seed)

    def simpler(self) -> list[Model]:
        return []

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.reference


def _captured(own: OwnModel) -> tuple[int, bool]:
    """How many blocks the model has, and whether experts are among its layers."""
    alone = {name: own.base[name] for name in ("inputs", "loss") if name in own.base}
    micro = own.base["batch"].get("micro", 1)
    batch = {"global": own.base["batch"]["global"], "micro": micro}
    found = plan(own.build(seed=1234), {"mesh": {}, "batch": batch, **alone})
    return sum(len(stage.blocks) for stage in found.stages), bool(found.experts)


def _check_axes(spec: Spec, own: OwnModel, most_ranks: int) -> None:
    pinned = own.pinned
    axes = {f"mesh.{axis}": pinned.get(f"mesh.{axis}", 1) for axis in AXES}
    if world_size(axes) > most_ranks:
        what = f"the spec's mesh has {world_size(axes)} ranks, but a case has at most {most_ranks}"
        raise spec.error("mesh", what, f"give --nproc {world_size(axes)}, or reduce the mesh")
    if all(f"mesh.{axis}" in pinned for axis in AXES):
        what = f"the spec writes {', '.join(axes)}: no layout remains to draw"
        raise spec.error("mesh", what, "remove one of them, or set it to auto; `meshwright verify` runs one layout")


def _without_auto(values: Any) -> dict[str, Any]:
    """Keys with auto are drawn, like absent keys."""
    kept = {name: value for name, value in values.items() if value != AUTO}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _at(values: dict[str, Any], name: str) -> Any:
    found: Any = values
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
