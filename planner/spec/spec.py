"""The spec: one YAML file (or dict) becomes one frozen Spec, every key checked.

Every key has a default but ``mesh``, ``batch.global``, ``batch.micro`` and, unless plan() gets example inputs,
``inputs``. An error names the line of the file, or the dotted path if the spec is a dict; all errors come at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from passes.errors import PlanError, SpecError, Where
from passes.lowering import Options
from passes.ops.flash import FLASH
from planner.capture.forms import Forms, forms_of, in_rows
from planner.files.named_code import FUNCTION_FORMS, is_named
from planner.spec.cluster import find_cluster
from planner.spec.conflicts import conflicts, with_auto
from planner.spec.fields import (
    AUTO,
    MOST_INPUTS,
    MOST_NAMES,
    Auto,
    File,
    Flag,
    Name,
    NullIsNone,
    Seed,
    Size,
    beside_the_spec,
    key,
    required,
)
from planner.spec.inputs import (
    TELLING,
    AuditSpec,
    DataSpec,
    InputSpec,
    inputs_at,
    length_problems,
    lengths_of,
    num_sequences,
    resolve_like,
    role_of,
    tokens_of,
)
from planner.spec.lines import locate, read_yaml
from planner.spec.messages import describe_value, flow
from planner.spec.optimizer import OptimizerSpec
from planner.spec.sections import (
    BatchSpec,
    CudaGraphsSpec,
    ExpertsSpec,
    InitializationSpec,
    MeshSpec,
    PipelineSpec,
    PrecisionSpec,
    TensorParallelSpec,
)

_INPUTS = {"input_ids": {"shape": [1024], "dtype": "int64", "high": 50257}, "labels": {"like": "input_ids"}}
_OUTPUT = {"type": ["string", "integer"], "description": "its name, or its index"}
_LOSS = {"type": "object", "properties": {"output": _OUTPUT}, "required": ["output"], "additionalProperties": False}
_FUNCTION = {"type": "string", "pattern": ".:.", "description": f"your function of (outputs, batch): {FUNCTION_FORMS}"}
_Kind = Annotated[Literal["none", "full", "selective"], NullIsNone]
Recompute = Annotated[_Kind | Auto | Annotated[dict[Name, _Kind], Field(max_length=MOST_NAMES)], NullIsNone]


def _loss(value: Any) -> str:
    """Return auto, the name (or index) of the output that ``{output: NAME}`` gives, or the name of a function."""
    name = value["output"] if isinstance(value, Mapping) and set(value) == {"output"} else None
    if isinstance(value, str) and (value == AUTO or is_named(value)):
        return value
    if isinstance(name, (str, int)) and not isinstance(name, bool) and name != "" and not is_named(name):
        return str(name)
    fix = f"write auto, {{output: NAME}} with the name of the model's output, or a function: {FUNCTION_FORMS}"
    raise SpecError(f"loss cannot be {describe_value(value)}", where="loss", fix=fix)


Loss = Annotated[
    str,
    BeforeValidator(_loss),
    beside_the_spec("loss"),
    PlainSerializer(lambda name: name if name == AUTO or is_named(name) else {"output": name}),
    WithJsonSchema({"anyOf": [{"const": AUTO}, _LOSS, _FUNCTION]}),
]


def _or_auto(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"const": AUTO}]


class Spec(File):
    """The full spec. Frozen; specs with equal values are equal, from any file."""

    mesh: MeshSpec = required(
        "axis sizes; `auto` leaves one axis to the search, `mesh: auto` all of them",
        {"tp": 2, "pp": 2},
        AUTO,
        json_schema_extra=_or_auto,
    )
    batch: BatchSpec = required("batch sizes, in sequences", {"global": 16, "micro": 2})
    inputs: Annotated[dict[Name, InputSpec], Field(max_length=MOST_INPUTS), AfterValidator(resolve_like)] = key(
        {}, "keyword arguments of the model, without the batch dim", examples=[_INPUTS]
    )
    loss: Loss = key(
        AUTO,
        "auto; {output: NAME} with the name of the output that is the loss; or your own function of (outputs, batch): "
        "path/file.py:function",
    )
    tensor_parallel: TensorParallelSpec = key(TensorParallelSpec(), "sharding inside a layer")
    experts: ExpertsSpec = key(ExpertsSpec(), "experts behind a router")
    pipeline: PipelineSpec = key(PipelineSpec(), "stages and their schedule")
    optimizer: OptimizerSpec = key(OptimizerSpec(), "optimizer and its state")
    precision: PrecisionSpec = key(PrecisionSpec(), "dtypes and loss scale")
    cuda_graphs: CudaGraphsSpec = key(CudaGraphsSpec(), "capture of CUDA graphs")
    recompute: Recompute = key(
        "none",
        "none | full | selective | auto, or {glob over names of blocks: kind}; the last matching glob decides",
    )
    compile: Flag | Auto = key(
        AUTO,
        "compile runs of ops between matrix products and collectives (torch.compile's Inductor); auto: on a cluster of "
        "GPUs with triton, without cuda_graphs",
    )
    fuse_norms: Flag | Auto = key(
        AUTO,
        "fuse spelled-out RMS norms to aten.rms_norm: one kernel on a GPU, with different rounding; auto: as compile",
    )
    emulate_precision_casts: Flag = key(
        True, "compiled code rounds to bfloat16 and float16 wherever the model does; false: Inductor skips such casts"
    )
    attention: Literal["auto", "flash", "cudnn"] = key(
        AUTO, "kernel of attention over cp: auto | flash | cudnn, which torch must take on every rank; auto: flash"
    )
    dropout: Literal["fast", "layout_invariant"] = key(
        "fast", "fast | layout_invariant: equal masks under every layout, slower"
    )
    initial_weights: Literal["broadcast", "require_equal"] = key(
        "broadcast", "broadcast: all ranks take those of rank 0 | require_equal: refuse different ones"
    )
    seed: Seed = key(1234, "seed of dropout, fresh weights and batches")
    audit: AuditSpec = key(AuditSpec(), "comparison of a run with the model itself in one process")
    data: DataSpec = key(DataSpec(), "sequences from a text")
    cluster: Name | None = key(
        None, "YAML file that describes the machines; relative to the working directory or to this file"
    )
    devices: Size | None = key(None, "number of devices for the search; null: all of the cluster")
    initialization: InitializationSpec = key(InitializationSpec(), "initialization of models on the meta device")

    @staticmethod
    def load(source: Spec | Mapping[str, Any] | str | PathLike[str], missing: Mapping[str, Any] | None = None) -> Spec:
        """Return the checked spec of a YAML file, a dict, or a Spec (unchanged). ``missing``: keys that may be absent.

        Raises:
            SpecError: all errors, each with a line number or dotted path, and a fix.
        """
        if isinstance(source, Spec):
            return source
        value, locations = (source, {}) if isinstance(source, Mapping) else _read_file(source)
        if missing and isinstance(value, Mapping):
            value = {**missing, **value}
        return Spec.checked(value, locations)

    @field_validator("cluster")
    @classmethod
    def _found(cls, value: str | None, info: Any) -> str | None:
        return find_cluster(value, locate(info.context or {}, "cluster"))

    @model_validator(mode="before")
    @classmethod
    def _left_to_the_search(cls, value: Any) -> Any:
        return with_auto(value)

    def fill_in(self) -> None:
        """Set ``batch.global`` by ``batch.tokens``: sequences of a step at the longest length."""
        is_open = self.batch.tokens is not None and not self.batch.global_size
        if is_open and self.inputs and not list(length_problems(self.inputs)):
            object.__setattr__(self, "batch", self._filled().batch)  # frozen for all others

    def problems(self) -> Iterator[PlanError]:
        yield from conflicts(self)

    def locate(self, error: PlanError) -> PlanError:
        """Return ``error`` at its line of the spec, if its place is the dotted path of a key; otherwise unchanged."""
        is_key = isinstance(error.where, str) and error.where.split(".")[0] in Spec.model_fields
        return self.error(str(error.where), error.what, error.fix) if is_key else error

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add the line of the spec to a PlanError of the block."""
        try:
            yield
        except PlanError as error:
            raise self.locate(error) from error.__cause__

    def require_inputs(self) -> dict[str, InputSpec]:
        """Return ``inputs``, for a plan without example inputs. Raises SpecError if there are none."""
        if not self.inputs:
            fix = f"add `{flow({'inputs': _INPUTS})}`; in Python, plan() takes example_inputs instead"
            raise self.error("inputs", "inputs is missing", fix)
        return self.inputs

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of a sequence, ascending; () if the inputs have one."""
        return lengths_of(self.inputs)

    def at(self, place: int) -> Spec:
        """Return the spec of one length, the one at ``place`` of ``lengths``; itself if it has one."""
        if not self.lengths:
            return self
        inputs, data = inputs_at(self.inputs, place), self.data
        if data.mean_document is not None:  # documents are cut to this length
            data = data.model_copy(update={"mean_document": min(data.mean_document, tokens_of(inputs))})
        return self.model_copy(update={"inputs": inputs, "data": data})._filled()

    def of_run(self, num_steps: int) -> Spec:
        """Return the spec with the steps of the learning rate for a run of ``num_steps``."""
        schedule = self.optimizer.schedule.of_run(num_steps)
        if schedule == self.optimizer.schedule:
            return self
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"schedule": schedule})})

    @property
    def longest(self) -> Spec:
        """Return the spec of the longest length."""
        return self.at(-1)

    def chosen(self, one: Spec) -> Spec:
        """The same with what a search, or one length, has settled: every key of ``one`` but those that lengths differ
        in."""
        batch = self.batch.model_copy(update={"micro": one.batch.micro})
        return one.model_copy(update={"inputs": self.inputs, "batch": batch})._filled().located(self._locations)

    def _filled(self) -> Spec:
        """Return the spec with as many sequences as ``batch.tokens`` makes."""
        sequences = num_sequences(self.batch, inputs_at(self.inputs, -1), self.mesh.dp)
        return self.model_copy(update={"batch": self.batch.model_copy(update={"global_size": sequences})})

    @property
    def forms(self) -> Forms:
        """Return forms of inputs without one row for each sample, or with a value; of one length."""
        return forms_of(self.inputs)

    def in_rows(self, batch: Any) -> Any:
        """Return a batch with one row of each input for a sample."""
        return in_rows(self.forms, batch, {} if self.lengths else {name: i.sizes for name, i in self.inputs.items()})

    @property
    def telling_inputs(self) -> tuple[str, ...]:
        """The inputs by which a model keeps packed documents apart. None under CUDA graphs: attention in them would
        hold the blocks of its capture's documents."""
        if self.data.packing != "documents" or self.cuda_graphs.impl != "none":
            return ()
        return tuple(name for name in self.inputs if role_of(name, self.data.inputs) in TELLING)

    def options(self, *, cp: int) -> Options:
        """Return the options of the passes, over ``cp`` ranks of a sequence."""
        attention = FLASH if self.attention == AUTO else self.attention  # until a measurement on a GPU says otherwise
        own_tokens = cp > 1 and self.recompute == self.cuda_graphs.impl == "none"
        return Options(**self.tensor_parallel.options(), own_tokens=own_tokens, attention=attention)

    def compiles(self, *, on_gpu: bool) -> bool:
        """Whether the plan has compiled pieces. ``on_gpu``: the cluster has GPUs. Graphs of compiled pieces have not
        run on a GPU: auto is off beside them."""
        return on_gpu and self.cuda_graphs.impl == "none" if self.compile == AUTO else self.compile

    def fuses_norms(self, *, on_gpu: bool) -> bool:
        return self.compiles(on_gpu=on_gpu) if self.fuse_norms == AUTO else self.fuse_norms

    @property
    def num_microbatches(self) -> int:
        """Return microbatches of one dp rank in a step. Raises SpecError while dp or batch.micro is auto."""
        dp, micro = self.mesh.dp, self.batch.micro
        if not isinstance(dp, int) or not isinstance(micro, int):
            at = "batch.micro" if isinstance(dp, int) else "mesh.dp"
            raise self.error(
                at, f"{at} is auto: the number of microbatches is not known before the search", f"choose {at}"
            )
        return self.batch.global_size // (micro * dp)

    def with_devices(self, devices: int) -> Spec:
        return Spec.load({**self.to_dict(), "devices": devices}).located(self._locations)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the YAML's keys; ``Spec.load`` of it gives an equal Spec."""
        return self.model_dump(mode="json", by_alias=True)


def _read_file(source: Any) -> tuple[Any, dict[str, Where]]:
    if not isinstance(source, (str, PathLike)):
        raise SpecError(
            f"a spec cannot be of type {type(source).__name__}", fix="give the path of a YAML file, a dict or a Spec"
        )
    value, locations = read_yaml(Path(source))
    if value is None:
        raise SpecError(
            "the spec is empty", where=Where(file=str(source), line=1), fix="give at least mesh, batch and inputs"
        )
    return value, locations
