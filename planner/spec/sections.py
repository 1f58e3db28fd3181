"""The sections of the spec: each key with its default and the reader that checks it."""

# ruff: noqa: RUF009 - key() makes a dataclass field, it is meant to be called in the class body

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from planner.mesh import Mesh
from planner.ranks import DEFAULT_ORDER
from planner.spec.fields import (
    AUTO,
    Cursor,
    boolean,
    choice,
    describe_value,
    integer,
    key,
    list_of,
    mapping_of,
    missing_key,
    number,
    section,
    text,
)
from planner.spec.lines import join

STYLES = ("column", "row", "vocab", "expert", "replicate")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
FLOATS = ("float32", "bfloat16", "float16", "float64")
DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool", *FLOATS)


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Sizes of the mesh axes; ``auto`` leaves one to the search. ``order``: the leftmost axis has stride 1.

    ``etp`` left out is tp: experts are cut like everything else.
    """

    tp: int | str = key(integer(auto=True), 1)
    pp: int | str = key(integer(auto=True), 1)
    dp: int | str = key(integer(auto=True), 1)
    vpp: int | str = key(integer(auto=True), 1)
    cp: int | str = key(integer(auto=True), 1)
    ep: int | str = key(integer(auto=True), 1)
    etp: int | str | None = key(integer(auto=True, optional=True), None)
    order: str = key(text(), DEFAULT_ORDER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.tp if self.etp is None else self.etp)

    @property
    def has_auto(self) -> bool:
        """Whether some size is left to the search."""
        return any(getattr(self, f.name) == AUTO for f in fields(self))

    def to_mesh(self) -> Mesh:
        """The mesh of these sizes, none of which is auto. Raises PlanError where they make none."""
        return Mesh(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Sequences of one step over all ranks, and sequences of one microbatch of one dp rank."""

    global_size: int = key(integer(), name="global", example="global: 16")
    micro: int = key(integer(), example="micro: 2")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor of the batch: ``shape`` without the batch dim; integers are drawn below ``high``.

    ``like`` names the input that the rest was taken from; here its values are already filled in.
    """

    shape: tuple[int, ...] = key(list_of(integer()), ())
    dtype: str = key(choice(*DTYPES), "int64")
    high: int | None = key(integer(optional=True), None)
    like: str | None = key(text(optional=True), None)


@dataclass(frozen=True, slots=True)
class TensorParallelSpec:
    """``overrides``: glob over dotted names -> style. The vocabulary is padded to a multiple of
    ``vocabulary_multiple``·tp."""

    sequence_parallel: bool = key(boolean, False)
    overrides: dict[str, str] = key(mapping_of(choice(*STYLES)), factory=dict)
    vocabulary_multiple: int = key(integer(), 128)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """``split``: blocks of each stage, or auto; ``group_size``: microbatches of an interleaved group (None = pp)."""

    schedule: str = key(choice(*SCHEDULES), "1f1b")
    split: tuple[int, ...] | str = key(list_of(integer(), auto=True), AUTO)
    group_size: int | None = key(integer(optional=True), None)


@dataclass(frozen=True, slots=True)
class LearningRateSpec:
    """``warmup`` steps up to lr, then constant, or down to ``min_lr`` at step ``steps`` as a cosine or a line."""

    kind: str = key(choice("constant", "cosine", "linear"), "constant")
    warmup: int = key(integer(0), 0)
    steps: int | None = key(integer(optional=True), None)
    min_lr: float = key(number(minimum=0), 0.0)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with decoupled weight decay; ``zero`` 1 shards its state over dp.

    ``bucket_size`` is in elements (None = the usual max(40 M, 1 M·dp)); ``clip_grad_norm`` None means no clipping.
    """

    name: str = key(choice("adamw"), "adamw")
    lr: float = key(number(minimum=0), 1.5e-4)
    betas: tuple[float, float] = key(list_of(number(minimum=0, below=1), length=2), (0.9, 0.95))
    eps: float = key(number(above=0), 1e-8)
    weight_decay: float = key(number(minimum=0), 0.01)
    zero: int = key(choice(0, 1), 1)
    clip_grad_norm: float | None = key(number(above=0, optional=True), 1.0)
    alignment: str = key(choice("nccl", "none"), "nccl")
    bucket_size: int | None = key(integer(optional=True), None)
    schedule: LearningRateSpec = key(section(LearningRateSpec), factory=LearningRateSpec)


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """``parameters`` None: as the model has them; ``gradients`` None: float32, or float64 where the parameter is."""

    parameters: str | None = key(choice(*FLOATS, optional=True), None)
    gradients: str | None = key(choice(*FLOATS, optional=True), None)
    loss_scale: str = key(choice("none", "dynamic"), "none")


@dataclass(frozen=True, slots=True)
class CudaGraphsSpec:
    """What to capture: an empty ``scope`` is the whole layer. Capture follows ``warmup_steps`` real steps."""

    impl: str = key(choice("none", "local", "transformer_engine", "emulate"), "none")
    scope: tuple[str, ...] = key(list_of(choice("attn", "mlp", "moe", "moe_router", "moe_preprocess")), ())
    warmup_steps: int = key(integer(0), 3)


@dataclass(frozen=True, slots=True)
class InitializationSpec:
    """Weights of a meta model: N(0, ``std``).

    ``residual_scale`` divides those right before the residual by sqrt(2·blocks).
    """

    std: float = key(number(minimum=0), 0.02)
    residual_scale: bool = key(boolean, True)


def read_mesh(cursor: Cursor) -> MeshSpec:
    if cursor.value == AUTO:
        return MeshSpec(**{f.name: AUTO for f in fields(MeshSpec) if f.name != "order"})
    return section(MeshSpec)(cursor)


def read_loss(cursor: Cursor) -> str:
    if cursor.value == AUTO:
        return AUTO
    if isinstance(cursor.value, Mapping) and set(cursor.value) == {"output"}:
        output = cursor.child("output")
        is_index = isinstance(output.value, int) and not isinstance(output.value, bool)
        return str(output.value) if is_index else text()(output)
    raise cursor.error(
        f"loss cannot be {describe_value(cursor.value)}",
        "write auto, or {output: NAME} with the name of the model's output",
    )


def read_inputs(cursor: Cursor) -> dict[str, InputSpec]:
    given = mapping_of(section(InputSpec))(cursor)
    return {name: _resolve_like(cursor, given, name) for name in given}


def _resolve_like(cursor: Cursor, given: dict[str, InputSpec], name: str) -> InputSpec:
    chain = [name]  # name, the input it is like, ...: the nearest one that gives a key wins
    while (like := given[chain[-1]].like) is not None:
        at = cursor.child(chain[-1]).child("like")
        if like not in given:
            raise at.error(f"{at.path} names no input: '{like}'", f"name another input; there are: {', '.join(given)}")
        if like in chain:
            raise at.error(
                f"{at.path}: the inputs are like each other in a circle", "give one of them a shape and a dtype"
            )
        chain.append(like)
    values: dict[str, Any] = {"like": given[name].like}
    for attribute in ("shape", "dtype", "high"):
        owner = next((n for n in chain if attribute in cursor.value[n]), None)
        if owner is None and attribute != "high":
            raise missing_key(
                cursor.child(name), attribute, "shape: [1024]" if attribute == "shape" else "dtype: int64"
            )
        values[attribute] = None if owner is None else getattr(given[owner], attribute)
    if values["high"] is not None and (values["dtype"] in FLOATS or values["dtype"] == "bool"):
        at = join(join(cursor.path, name), "high")
        raise cursor.error(
            f"{at} is for integers, not {values['dtype']}", "remove `high`, or choose an integer dtype", path=at
        )
    return InputSpec(**values)
