"""The sections of the spec: each key with its type, its default and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from planner.errors import PlanError, SpecError
from planner.fold import LOOP, Fold
from planner.mesh import SIZES, Mesh
from planner.pipeline.layout import KEY, PATTERN, WORDS, read_layout, spelled
from planner.pipeline.schedule import KINDS
from planner.ranks import DEFAULT_ORDER
from planner.spec.fields import (
    AUTO,
    LARGEST_SIZE,
    MOST_DIMS,
    MOST_NAMES,
    Auto,
    Count,
    Dtype,
    Flag,
    Float,
    Fraction,
    Name,
    NotNegative,
    NullIsNone,
    Positive,
    Section,
    Size,
    Style,
    Word,
    key,
    optional_by_like,
    required,
)
from planner.spec.messages import describe_value

STYLES: tuple[str, ...] = get_args(Style)


def needs_auto_mesh(path: str, example: Any) -> PlanError:
    """A key is left to the search, but no axis is: nothing searches."""
    fix = f"write a value, such as {example}, or mesh: auto"
    return SpecError(f"{path} is auto, but no axis of the mesh is: nothing is searched", where=path, fix=fix)


class MeshSpec(Section):
    tp: Size | Auto = key(1, "tensor parallel: ranks that share each layer")
    pp: Size | Auto = key(1, "pipeline parallel: ranks that share the sequence of layers")
    dp: Size | Auto = key(1, "data parallel: replicas that share the batch")
    vpp: Size | Auto = key(1, "chunks of each pipeline rank, for interleaved_1f1b; 2 for zero_bubble_v")
    cp: Size | Auto = key(1, "context parallel: ranks that share each sequence")
    ep: Size | Auto = key(1, "expert parallel")
    etp: Size | Auto | None = key(None, "tensor parallel inside each expert; null: tp", validate_default=True)
    order: Name = key(DEFAULT_ORDER, "the leftmost axis joins neighbouring ranks; auto, beside an axis that is auto")

    @model_validator(mode="before")
    @classmethod
    def _with_auto(cls, value: Any) -> Any:
        """`mesh: auto` leaves all to the search; where one axis is auto, dp takes what the others leave."""
        if value == AUTO:
            return dict.fromkeys(cls.model_fields, AUTO)
        if isinstance(value, Mapping) and any(value.get(axis) == AUTO for axis in SIZES):
            return {"dp": AUTO, **value}
        return value

    @field_validator("etp")
    @classmethod
    def _as_tp(cls, value: Any, info: Any) -> Any:
        tp = info.data.get("tp")
        return tp if value is None and tp != AUTO else value

    @property
    def has_auto(self) -> bool:
        """Whether some size is left to the search."""
        return any(getattr(self, axis) == AUTO for axis in SIZES)

    def to_mesh(self, fold: Fold = LOOP) -> Mesh:
        """The mesh of these sizes, none of which is auto. Raises PlanError where they make none."""
        return Mesh(**dict(self), fold=fold)

    def problems(self) -> Iterator[PlanError]:
        if self.order == AUTO and not self.has_auto:
            yield needs_auto_mesh("mesh.order", DEFAULT_ORDER)
        elif not self.has_auto:
            try:
                self.to_mesh()
            except PlanError as error:
                yield error


class BatchSpec(Section):
    global_size: Size = required("sequences of one step over all replicas; divisible by micro · dp", 16, alias="global")
    micro: Size | Auto = required("sequences of one microbatch of one replica; auto, beside an axis that is auto", 2)


class InputSpec(Section):
    """One tensor of the batch. In a Spec, what it takes from the input that it is ``like`` is filled in."""

    shape: Annotated[tuple[Size, ...], Field(max_length=MOST_DIMS)] = optional_by_like(
        (), "without the batch dim; required, unless like another input"
    )
    dtype: Dtype = optional_by_like("int64", "of the tensor; required, unless like another input")
    high: Size | None = key(None, "integers are drawn below it")
    like: Name | None = key(None, "another input, from which this one takes what it does not say")


class TensorParallelSpec(Section):
    sequence_parallel: Flag | Auto = key(False, "cut the sequence too, between the parallel regions")
    regather: Flag = key(True, "with sequence_parallel: gather what linears read again in the backward, do not keep it")
    overrides: Annotated[dict[Name, Annotated[Style, Word]], Field(max_length=MOST_NAMES)] = key(
        {},
        "glob over dotted names of parameters or modules: column | row | vocab | expert | replicate; the last glob "
        "that names a parameter decides; a bias follows the matrix of its module",
    )
    vocabulary_multiple: Size = key(128, "the vocabulary is padded to a multiple of this · tp")


class EvenSplit(Section):
    """Blocks dealt out evenly over the ranks, but for what is said here."""

    first: Size | None = key(None, "blocks of the first pipeline rank")
    last: Size | None = key(None, "blocks of the last pipeline rank")
    embedding: Flag = key(False, "the embedding counts as a block")
    loss: Flag = key(False, "the loss counts as a block")


def _split(value: Any) -> Any:
    """A layout is read as soon as the spec is; one that is written out becomes one of letters."""
    rows = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(word, str) for row in rows if isinstance(row, (list, tuple)) for word in row):
        value = spelled([_words(row, index) for index, row in enumerate(rows)])
    if isinstance(value, str) and value != AUTO:
        read_layout(value)
    return value


def _words(row: Any, index: int) -> list[str]:
    """One stage of a layout that is written out."""
    at, fix = f"{KEY}.{index}", f"give a list of {', '.join(WORDS)}"
    if not isinstance(row, (list, tuple)):
        raise SpecError(f"{at} is {describe_value(row)}, not a list", where=at, fix=fix)
    for i, word in enumerate(row):
        if not isinstance(word, str) or word not in WORDS:
            raise SpecError(f"{at}.{i} is {describe_value(word)}, which is no layer", where=f"{at}.{i}", fix=fix)
    return list(row)


_SIZE = {"type": "integer", "minimum": 1, "maximum": LARGEST_SIZE}
_ROW = {"type": "array", "items": {"anyOf": [_SIZE, {"enum": [*WORDS]}]}}
Split = Annotated[
    Auto | Name | tuple[Size, ...] | tuple[tuple[Size, ...], ...] | EvenSplit,
    BeforeValidator(_split),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"anyOf": [_SIZE, _ROW]}},
                {"const": AUTO},
                {"type": "string", "pattern": PATTERN, "description": "a layout: Et*3|t*4|tL"},
                {
                    "additionalProperties": False,
                    **EvenSplit.model_json_schema(),
                    "description": "evenly, but for these",
                },
            ]
        }
    ),
]


class PipelineSpec(Section):
    schedule: Literal[(*KINDS, AUTO)] = key("1f1b", " | ".join((*KINDS, AUTO)))  # pyright: ignore[reportInvalidTypeForm]
    split: Split = key(
        AUTO,
        "or the number of blocks of each stage: [6, 6]; of each chunk of each pp rank: [[3, 3], [2, 4]]; a layout of "
        "embedding, blocks and loss: Et*5|t*7L; or evenly but for {first: 5}, {last: 5}, {embedding: true, loss: true}",
    )
    group_size: Size | None = key(None, "microbatches of an interleaved group; null: pp")

    def problems(self) -> Iterator[PlanError]:
        split = self.split
        if isinstance(split, EvenSplit) and (split.embedding or split.loss) and (split.first or split.last):
            what = "pipeline.split: embedding and loss count as blocks only where first and last are not given"
            yield SpecError(what, where="pipeline.split", fix="keep the one or the other")


class LearningRateSpec(Section):
    kind: Literal["constant", "cosine", "linear"] = key("constant", "constant | cosine | linear, after the warm-up")
    warmup: Count = key(0, "steps from 0 up to lr")
    steps: Size | None = key(None, "where the decay ends; cosine and linear need it")
    min_lr: NotNegative = key(0.0, "the rate at that end")

    def problems(self) -> Iterator[PlanError]:
        at = "optimizer.schedule"
        if self.kind != "constant" and self.steps is None:
            what = f"{at}.steps is missing: a {self.kind} decay has an end"
            yield SpecError(what, where=at, fix="add `steps: 10000`")
        if self.steps is not None and self.warmup > self.steps:
            what = f"{at}.warmup = {self.warmup} is more than steps = {self.steps}"
            yield SpecError(what, where=f"{at}.warmup", fix="warm up for fewer steps")


class OptimizerSpec(Section):
    name: Literal["adamw"] = key("adamw", "the only one that there is")
    lr: NotNegative = key(1.5e-4, "the learning rate after the warm-up")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.95), "decay of the running means of the gradient and of its square")
    eps: Positive = key(1.0e-8, "added to the root of the mean square")
    weight_decay: NotNegative = key(0.01, "decoupled from the gradient")
    zero: Annotated[Literal[0, 1], Word] = key(
        1, "1: each replica keeps its share of the optimizer's state; 0: all of it"
    )
    clip_grad_norm: Positive | None = key(1.0, "of all parameters together; null: no clipping")
    alignment: Annotated[Literal["nccl", "none"], NullIsNone] = key(
        "nccl", "nccl: padded for the network; none: parameters lie end to end"
    )
    bucket_size: Size | None = key(None, "elements of one gradient exchange; null: max(40 million, 1 million · dp)")
    ema: Fraction | None = key(
        None, "decay of a running mean of the weights, kept beside them and saved with them; null: none"
    )
    schedule: LearningRateSpec = key(LearningRateSpec(), "the learning rate of each step")

    def problems(self) -> Iterator[PlanError]:
        if self.schedule.min_lr > self.lr:
            at = "optimizer.schedule.min_lr"
            what = f"{at} = {self.schedule.min_lr:g} is more than optimizer.lr = {self.lr:g}"
            yield SpecError(what, where=at, fix="choose a smaller min_lr")


class PrecisionSpec(Section):
    parameters: Float | None = key(None, "float32 | bfloat16 | float16 | float64; null: as the model has them")
    gradients: Float | None = key(
        None, "of the buffers that add them up; null: float32 (float64 where the parameter is)"
    )
    loss_scale: Annotated[Literal["none", "dynamic"] | Positive, NullIsNone] = key(
        "none",
        "none | a number that the loss is multiplied by, and gradients divided by | dynamic: from 32768, halved where "
        "gradients overflow, doubled after 2000 good steps",
    )
    nonfinite: Literal["stop", "skip"] | None = key(
        None, "a step that is not finite: stop | skip; null: skip with a dynamic loss scale, else stop"
    )


FULL_ITERATION = "full_iteration"
_PARTS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
_MOST_PARTS = 2 * (len(_PARTS) + 1)
_SCOPE = {"enum": [*_PARTS, FULL_ITERATION]}


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class CudaGraphsSpec(Section):
    impl: Annotated[Literal["none", "local", "transformer_engine", "emulate"], NullIsNone] = key(
        "none", "none | local | transformer_engine | emulate"
    )
    scope: Annotated[
        tuple[Literal[(*_PARTS, FULL_ITERATION)], ...],  # pyright: ignore[reportInvalidTypeForm]
        Field(max_length=_MOST_PARTS),
        BeforeValidator(_one_or_more),
        WithJsonSchema({"anyOf": [{"type": "array", "items": _SCOPE, "maxItems": _MOST_PARTS}, _SCOPE]}),
    ] = key((), f"{', '.join(_PARTS)}; []: the whole layer; {FULL_ITERATION}: one graph of all microbatches")
    warmup_steps: Count = key(3, "real steps before the capture, 1 or more")

    def problems(self) -> Iterator[PlanError]:
        at = "cuda_graphs.scope"
        if "moe_preprocess" in self.scope and "moe_router" not in self.scope:
            yield SpecError(f"{at}: moe_preprocess needs moe_router", where=at, fix="add moe_router")
        if "moe" in self.scope and "moe_router" in self.scope:
            yield SpecError(f"{at}: moe already contains moe_router", where=at, fix="keep one of them")
        if FULL_ITERATION in self.scope and len(self.scope) > 1:
            fix = f"write scope: [{FULL_ITERATION}], or leave it out"
            yield SpecError(f"{at}: {FULL_ITERATION} already contains every part of every block", where=at, fix=fix)
        if FULL_ITERATION in self.scope and self.impl == "transformer_engine":
            what = f"{at}: transformer_engine captures parts of blocks, not a {FULL_ITERATION}"
            yield SpecError(what, where=at, fix="set impl: local or emulate, or another scope")
        if self.impl != "none" and not self.warmup_steps:
            at = "cuda_graphs.warmup_steps"
            what = f"{at} is 0: kernels are loaded and workspaces made in real steps, never while a graph is captured"
            yield SpecError(what, where=at, fix="set it to 1 or more")


class InitializationSpec(Section):
    method: Literal["normal", "model"] = key(
        "normal", "normal: as below | model: by its own reset_parameters and _init_weights"
    )
    std: NotNegative = key(0.02, "of the normal distribution of every matrix")
    residual_scale: Flag = key(True, "divide the weights before the residual by sqrt(2 · blocks)")
