"""The sections of the spec: each key with its type, default and meaning."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from passes.errors import PlanError, SpecError, Where
from planner.files.text import is_file, read_text
from planner.fold import LOOP, Fold
from planner.mesh import SIZES, Mesh
from planner.pipeline.kinds import KINDS, MOST_ACTIONS
from planner.pipeline.layout import KEY, PATTERN, WORDS, read_layout, spelled
from planner.pipeline.schedule import Schedule
from planner.pipeline.simulate import format_schedule, schedule_by_hand
from planner.ranks import DEFAULT_ORDER
from planner.spec.fields import (
    AUTO,
    LARGEST_SIZE,
    MOST_NAMES,
    AtLeastOne,
    Auto,
    Count,
    Flag,
    Float,
    Name,
    NotNegative,
    NullIsNone,
    Positive,
    Section,
    Size,
    Style,
    Word,
    key,
    required,
)
from planner.spec.lines import locate
from planner.spec.messages import describe_value, no_choice, wrong

GLOBAL = "global"
STYLES: tuple[str, ...] = get_args(Style)
_SIZE = {"type": "integer", "minimum": 1, "maximum": LARGEST_SIZE}
_ROW = {"type": "array", "items": {"anyOf": [_SIZE, {"enum": [*WORDS]}]}}
FULL_ITERATION = "full_iteration"
_PARTS = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
_MOST_PARTS = 2 * (len(_PARTS) + 1)
_SCOPE = {"enum": [*_PARTS, FULL_ITERATION]}


def needs_auto_mesh(path: str, example: Any) -> PlanError:
    """Return the error that a key is left to the search, but no axis is: nothing searches."""
    what = " is auto, but no axis of the mesh is auto, so that nothing is searched"
    return wrong(path, what, f"write a value, such as {example}, or mesh: auto")


class MeshSpec(Section):
    tp: Size | Auto = key(1, "tensor parallel: ranks that shard each layer")
    pp: Size | Auto = key(1, "pipeline parallel: ranks that divide the sequence of layers")
    dp: Size | Auto = key(1, "data parallel: replicas that divide the batch")
    vpp: Size | Auto = key(1, "chunks per pipeline rank, for interleaved_1f1b; 2 for zero_bubble_v")
    cp: Size | Auto = key(1, "context parallel: ranks that divide each sequence")
    ep: Size | Auto = key(1, "expert parallel: ranks that divide the experts")
    etp: Size | Auto | None = key(None, "tensor-parallel size inside each expert; null: tp", validate_default=True)
    order: Name = key(DEFAULT_ORDER, "the leftmost axis joins adjacent ranks; may be auto if an axis is auto")

    @model_validator(mode="before")
    @classmethod
    def _with_auto(cls, value: Any) -> Any:
        """Expand `mesh: auto` to all axes; if one axis is auto, dp takes the ranks that the others leave."""
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
        return any(getattr(self, axis) == AUTO for axis in SIZES)

    def to_mesh(self, fold: Fold = LOOP, shard: int = 0) -> Mesh:
        """Return the mesh of these sizes, none of which is auto. Raises PlanError if they are not valid."""
        return Mesh(**dict(self), fold=fold, shard=shard)

    def problems(self) -> Iterator[PlanError]:
        if self.order == AUTO and not self.has_auto:
            yield needs_auto_mesh("mesh.order", DEFAULT_ORDER)
        elif not self.has_auto:
            try:
                self.to_mesh()
            except PlanError as error:
                yield error


class BatchSpec(Section):
    global_size: Size = key(
        0,
        "sequences per step over all replicas; divisible by micro · dp; required, unless tokens is given",
        alias="global",
        json_schema_extra=lambda schema: schema.pop("default", None),
    )
    tokens: Size | None = key(None, "in place of global: tokens per step, at most; of short sequences a step has more")
    micro: Size | Auto = required("sequences per microbatch of one replica; may be auto if an axis is auto", 2)
    statistics: Annotated[Literal["global", "microbatch"], Word] = key(
        GLOBAL,
        "the sequences over which a loss that is no sum, such as a balancing loss of experts, takes its means: global "
        "is exact, and runs all forwards of a step twice if a rank has several microbatches; microbatch is not",
    )


class TensorParallelSpec(Section):
    sequence_parallel: Flag | Auto = key(
        False, "shard activations along the sequence between the tensor-parallel regions"
    )
    regather: Flag = key(
        True, "with sequence_parallel: gather inputs of linears again in the backward instead of saving them"
    )
    overrides: Annotated[dict[Name, Annotated[Style, Word]], Field(max_length=MOST_NAMES)] = key(
        {},
        "glob over dotted names of parameters or modules: column | row | vocab | expert | replicate; the last glob "
        "that names a parameter decides; a bias follows the matrix of its module",
    )
    vocabulary_multiple: Size = key(128, "the vocabulary is padded to a multiple of this · tp")
    infer_rules: Flag = key(
        True, "an op that the planner does not know is sharded along the dims that trials on random values show"
    )

    def typing(self) -> dict[str, Any]:
        """Return the fields of planner.placement.candidates.Cutting that these keys decide."""
        asked = {"overrides": dict(self.overrides), "sequence_parallel": self.sequence_parallel is True}
        return {**asked, "vocabulary_multiple": self.vocabulary_multiple}

    def options(self) -> dict[str, Any]:
        """Return the fields of passes.lowering.Options that these keys decide."""
        return {"regather": self.sequence_parallel is True and self.regather}


class ExpertsSpec(Section):
    imbalance: AtLeastOne | None = key(
        None,
        "rows of the fullest rank of ep over the mean, for the predicted memory and time; training warns beyond it; "
        "null: as many on each, without a warning",
    )


class EvenSplit(Section):
    """Blocks distributed evenly over the ranks, except for these."""

    first: Size | None = key(None, "blocks of the first pipeline rank")
    last: Size | None = key(None, "blocks of the last pipeline rank")
    embedding: Flag = key(False, "the embedding counts as a block")
    loss: Flag = key(False, "the loss counts as a block")


def _split(value: Any) -> Any:
    """Read a layout together with the spec; one of words becomes one of letters."""
    rows = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(word, str) for row in rows if isinstance(row, (list, tuple)) for word in row):
        value = spelled([_words(row, index) for index, row in enumerate(rows)])
    if isinstance(value, str) and value != AUTO:
        read_layout(value)
    return value


def _words(row: Any, index: int) -> list[str]:
    """Return one stage of a layout of words."""
    at, fix = f"{KEY}.{index}", f"give a list of {', '.join(WORDS)}"
    if not isinstance(row, (list, tuple)):
        raise wrong(at, f" is {describe_value(row)}, not a list", fix)
    for i, word in enumerate(row):
        if not isinstance(word, str) or word not in WORDS:
            raise wrong(f"{at}.{i}", f" is {describe_value(word)}, not a layer", fix)
    return list(row)


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
                    "description": "evenly, except for these",
                },
            ]
        }
    ),
]


_SCHEDULES = (*KINDS, AUTO)
_FILE = {"file": {"type": "string", "description": "a file with such a text, relative to that of the spec"}}
_BY_HAND = [
    {"type": "string", "pattern": r"\n", "description": "a line of sizes, and a line of actions for each rank"},
    {"type": "object", "properties": _FILE, "required": ["file"], "additionalProperties": False},
]


class PipelineSpec(Section):
    schedule: Annotated[
        str | InstanceOf[Schedule],
        PlainSerializer(lambda value: format_schedule(value) if isinstance(value, Schedule) else value),
        WithJsonSchema({"anyOf": [{"enum": [*_SCHEDULES]}, *_BY_HAND]}),
    ] = key(
        "1f1b",
        f"{' | '.join(_SCHEDULES)}; or by hand, {{file: NAME}}: a text as `plan --format schedule` prints it",
    )
    split: Split = key(
        AUTO,
        "blocks of each stage: [6, 6]; of each chunk of each pp rank: [[3, 3], [2, 4]]; a layout of embedding, "
        "blocks and loss: Et*5|t*7L; or evenly except for {first: 5}, {last: 5}, {embedding: true, loss: true}",
    )
    group_size: Size | None = key(None, "microbatches per interleaved group; null: pp")

    @field_validator("schedule", mode="before")
    @classmethod
    def _by_hand(cls, value: Any, info: Any) -> Any:
        """Read the file of a schedule once: its text is the value. Its path is relative to the spec."""
        at = locate(info.context or {}, "pipeline.schedule")
        if isinstance(value, Mapping) and set(value) == {"file"} and isinstance(value["file"], str):
            path = Path(at.file).parent / value["file"]
            path = path if at.file and is_file(path) else Path(value["file"])
            text = read_text(path, "schedule", most_bytes=16 * MOST_ACTIONS, error=SpecError, fix="check its path")
            return schedule_by_hand(text, Where(file=str(path)))
        if isinstance(value, str) and "\n" in value:
            return schedule_by_hand(value, at if at.file else Where(file=at.module))
        if isinstance(value, Schedule) or (isinstance(value, str) and value in _SCHEDULES):
            return value
        raise no_choice(value, _SCHEDULES, "; or write {file: NAME}, of a text as `plan --format schedule` prints it")

    def problems(self) -> Iterator[PlanError]:
        split = self.split
        if isinstance(split, EvenSplit) and (split.embedding or split.loss) and (split.first or split.last):
            what = ": embedding and loss count as blocks only if first and last are not given"
            yield wrong(KEY, what, "remove either of the two")


class PrecisionSpec(Section):
    parameters: Float | None = key(None, "float32 | bfloat16 | float16 | float64; null: the model's own dtypes")
    gradients: Float | None = key(None, "dtype of gradient buffers; null: float32 (float64 for float64 parameters)")
    gather: Literal["bfloat16", "float16"] | None = key(
        None, "with optimizer.zero 3: dtype in which ranks send weights, which are then rounded to it; null: their own"
    )
    loss_scale: Annotated[Literal["none", "dynamic"] | Positive, NullIsNone] = key(
        "none",
        "none | a constant factor on the loss, divided out of the gradients | dynamic: starts at 32768, halved "
        "on overflow, doubled after 2000 good steps",
    )
    nonfinite: Literal["stop", "skip"] | None = key(
        None, "on NaN or Inf in loss or gradients: stop | skip; null: skip with a dynamic loss scale, otherwise stop"
    )


class CudaGraphsSpec(Section):
    impl: Annotated[Literal["none", "local", "transformer_engine", "emulate"], NullIsNone] = key(
        "none", "none | local | transformer_engine | emulate"
    )
    scope: Annotated[
        tuple[Literal[(*_PARTS, FULL_ITERATION)], ...],  # pyright: ignore[reportInvalidTypeForm]
        Field(max_length=_MOST_PARTS),
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        WithJsonSchema({"anyOf": [{"type": "array", "items": _SCOPE, "maxItems": _MOST_PARTS}, _SCOPE]}),
    ] = key((), f"{', '.join(_PARTS)}; []: the whole layer; {FULL_ITERATION}: one graph of all microbatches")
    warmup_steps: Count = key(3, "eager steps before the capture, at least 1")

    def problems(self) -> Iterator[PlanError]:
        at = "cuda_graphs.scope"
        if "moe_preprocess" in self.scope and "moe_router" not in self.scope:
            yield wrong(at, ": moe_preprocess needs moe_router", "add moe_router")
        if "moe" in self.scope and "moe_router" in self.scope:
            yield wrong(at, ": moe already contains moe_router", "keep one of them")
        if FULL_ITERATION in self.scope and len(self.scope) > 1:
            fix = f"write scope: [{FULL_ITERATION}], or remove {FULL_ITERATION}"
            yield wrong(at, f": {FULL_ITERATION} already contains every part of every block", fix)
        if FULL_ITERATION in self.scope and self.impl == "transformer_engine":
            what = f": transformer_engine captures parts of blocks, not a {FULL_ITERATION}"
            yield wrong(at, what, "set impl: local or emulate, or another scope")
        if self.impl != "none" and not self.warmup_steps:
            what = " is 0: kernels and workspaces must be set up in eager steps before a graph is captured"
            yield wrong("cuda_graphs.warmup_steps", what, "set it to 1 or more")


class InitializationSpec(Section):
    method: Literal["normal", "model"] = key(
        "normal", "normal: as below | model: the model's reset_parameters and _init_weights"
    )
    std: NotNegative = key(0.02, "standard deviation of every matrix")
    residual_scale: Flag = key(True, "divide weights of residual projections by sqrt(2 · blocks)")
