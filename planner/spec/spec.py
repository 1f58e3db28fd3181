"""The spec: one YAML file (or dict) becomes one frozen Spec, checked key by key.

Every key has a default but ``mesh``, ``batch.global``, ``batch.micro`` and, unless plan() gets example inputs,
``inputs``. An error names the line of the file, or the dotted path where the spec was a dict.
"""

# ruff: noqa: RUF009 - key() makes a dataclass field, it is meant to be called in the class body

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from planner.errors import PlanError, SpecError, Where
from planner.spec.cluster import find_cluster
from planner.spec.fields import (
    AUTO,
    Cursor,
    choice,
    integer,
    key,
    key_of,
    locate,
    read_section,
    section,
    spec_fields,
    text,
)
from planner.spec.lines import read_yaml
from planner.spec.sections import (
    BatchSpec,
    CudaGraphsSpec,
    InitializationSpec,
    InputSpec,
    MeshSpec,
    OptimizerSpec,
    PipelineSpec,
    PrecisionSpec,
    TensorParallelSpec,
    read_inputs,
    read_loss,
    read_mesh,
)

_INPUTS_EXAMPLE = "inputs: {input_ids: {shape: [1024], dtype: int64, high: 50257}, labels: {like: input_ids}}"


@dataclass(frozen=True, slots=True)
class Spec:
    """The whole spec. Frozen; equal specs compare equal wherever they were read from."""

    mesh: MeshSpec = key(read_mesh, example="mesh: {tp: 2, pp: 2}")
    batch: BatchSpec = key(section(BatchSpec), example="batch: {global: 16, micro: 2}")
    inputs: dict[str, InputSpec] = key(read_inputs, factory=dict)
    loss: str = key(read_loss, AUTO)
    tensor_parallel: TensorParallelSpec = key(section(TensorParallelSpec), factory=TensorParallelSpec)
    pipeline: PipelineSpec = key(section(PipelineSpec), factory=PipelineSpec)
    optimizer: OptimizerSpec = key(section(OptimizerSpec), factory=OptimizerSpec)
    precision: PrecisionSpec = key(section(PrecisionSpec), factory=PrecisionSpec)
    cuda_graphs: CudaGraphsSpec = key(section(CudaGraphsSpec), factory=CudaGraphsSpec)
    recompute: str = key(choice("none", "full", "selective"), "none")
    initial_weights: str = key(choice("broadcast", "require_equal"), "broadcast")
    seed: int = key(integer(0), 1234)
    cluster: str | None = key(text(optional=True), None)
    initialization: InitializationSpec = key(section(InitializationSpec), factory=InitializationSpec)
    locations: dict[str, Where] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def load(source: Spec | Mapping[str, Any] | str | PathLike[str]) -> Spec:
        """The checked spec of a YAML file, a dict, or a Spec (given back as it is).

        Raises:
            SpecError: one error with the line or dotted path, and a fix.
        """
        if isinstance(source, Spec):
            return source
        value, locations = (source, {}) if isinstance(source, Mapping) else _read_file(source)
        spec = Spec(**read_section(Spec, Cursor(value, "", locations)), locations=locations)
        spec = replace(spec, cluster=find_cluster(spec.cluster, spec.location("cluster")))
        for check in _CHECKS:
            check(spec)
        return spec

    def location(self, path: str) -> Where:
        """Where the key with this dotted path stands, or the nearest key around it: "spec.yaml:3"."""
        return locate(self.locations, path)

    def error(self, path: str, what: str, fix: str = "") -> SpecError:
        """A SpecError that points at the key ``path``."""
        return SpecError(what, where=self.location(path), fix=fix)

    def locate(self, error: PlanError) -> PlanError:
        """``error`` at its line of the spec, where its place is the dotted path of a key; otherwise as it is."""
        is_key = isinstance(error.where, str) and error.where.split(".")[0] in {f.name for f in spec_fields(self)}
        return self.error(str(error.where), error.what, error.fix) if is_key else error

    def require_inputs(self) -> dict[str, InputSpec]:
        """``inputs``, for a plan without example inputs. Raises SpecError where there are none."""
        if not self.inputs:
            raise self.error(
                "inputs", "inputs is missing, and plan() got no example_inputs", f"add `{_INPUTS_EXAMPLE}`"
            )
        return self.inputs

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one dp rank in a step. Raises SpecError while dp is auto."""
        if self.mesh.dp == AUTO:
            raise self.error(
                "mesh.dp", "mesh.dp is auto: the number of microbatches is not known yet", "choose mesh.dp"
            )
        return self.batch.global_size // (self.batch.micro * int(self.mesh.dp))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the YAML's keys; ``Spec.load`` of it gives an equal Spec."""
        values = _plain(self)
        if self.loss != AUTO:
            values["loss"] = {"output": self.loss}
        return values


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


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {key_of(f): _plain(getattr(value, f.name)) for f in spec_fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _check_mesh(spec: Spec) -> None:
    if spec.mesh.has_auto:
        return
    try:
        spec.mesh.to_mesh()
    except PlanError as error:
        raise spec.locate(error) from None


def _check_batch(spec: Spec) -> None:
    if spec.mesh.dp == AUTO:
        return
    size, micro, dp = spec.batch.global_size, spec.batch.micro, int(spec.mesh.dp)
    step = micro * dp
    if size % step:
        nearest = " or ".join(str(n) for n in (size // step * step, -(-size // step) * step) if n)
        raise spec.error(
            "batch.global",
            f"batch.global = {size} is not divisible by batch.micro · mesh.dp = {micro} · {dp} = {step}",
            f"set batch.global to {nearest}, or change batch.micro or mesh.dp",
        )


def _check_virtual_stages(spec: Spec) -> None:
    vpp, schedule = spec.mesh.vpp, spec.pipeline.schedule
    if vpp not in (1, AUTO) and schedule != "interleaved_1f1b":
        raise spec.error(
            "mesh.vpp",
            f"mesh.vpp = {vpp} needs an interleaved schedule, but pipeline.schedule is {schedule}",
            "set pipeline.schedule: interleaved_1f1b, or mesh.vpp: 1",
        )


def _check_split(spec: Spec) -> None:
    split, pp, vpp = spec.pipeline.split, spec.mesh.pp, spec.mesh.vpp
    if split == AUTO or AUTO in (pp, vpp):
        return
    stages = int(pp) * int(vpp)
    if len(split) != stages:
        raise spec.error(
            "pipeline.split",
            f"pipeline.split has {len(split)} stages, mesh.pp · mesh.vpp = {pp} · {vpp} = {stages}",
            f"list {stages} numbers of blocks, or write auto",
        )


def _check_learning_rate(spec: Spec) -> None:
    schedule, path = spec.optimizer.schedule, "optimizer.schedule"
    if schedule.kind != "constant" and schedule.steps is None:
        raise spec.error(path, f"{path}.steps is missing: a {schedule.kind} decay has an end", "add `steps: 10000`")
    if schedule.steps is not None and schedule.warmup > schedule.steps:
        raise spec.error(
            f"{path}.warmup",
            f"{path}.warmup = {schedule.warmup} is more than steps = {schedule.steps}",
            "warm up for fewer steps",
        )
    if schedule.min_lr > spec.optimizer.lr:
        raise spec.error(
            f"{path}.min_lr",
            f"{path}.min_lr = {schedule.min_lr:g} is more than optimizer.lr = {spec.optimizer.lr:g}",
            "choose a smaller min_lr",
        )


def _check_graph_scope(spec: Spec) -> None:
    scope, path = spec.cuda_graphs.scope, "cuda_graphs.scope"
    if "moe_preprocess" in scope and "moe_router" not in scope:
        raise spec.error(path, f"{path}: moe_preprocess needs moe_router", "add moe_router")
    if "moe" in scope and "moe_router" in scope:
        raise spec.error(path, f"{path}: moe already contains moe_router", "keep one of them")


_CHECKS = (_check_mesh, _check_virtual_stages, _check_split, _check_batch, _check_learning_rate, _check_graph_scope)
