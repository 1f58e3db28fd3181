"""Keys of a spec that depend on each other: those that a search is to decide too, and conflicts between valid ones.

mesh: auto                 all axes and their order, batch.micro, recompute, sequence parallelism, the schedule, ZeRO
mesh: {tp: auto, pp: 4}    tp, and dp, which takes the remaining ranks; batch.micro, if it is not written
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from passes.errors import PlanError, SpecError
from planner.mesh import SIZES
from planner.pipeline.kinds import KINDS, Sizes, default_kind
from planner.pipeline.layout import stage_problems
from planner.pipeline.schedule import Schedule
from planner.spec.fields import AUTO
from planner.spec.inputs import TELLING, batch_problems, length_problems, role_of, tokens_of
from planner.spec.messages import wrong
from planner.spec.sections import needs_auto_mesh
from planner.spec.update_rules import MATRIX_RULES

if TYPE_CHECKING:
    from planner.spec.spec import Spec

_MOST_ELEMENTS = 1 << 36
WITH_MICRO = (("batch", "micro"),)
WITH_ALL = (
    *WITH_MICRO,
    ("tensor_parallel", "sequence_parallel"),
    ("pipeline", "schedule"),
    ("optimizer", "zero"),
)


def conflicts(spec: Spec) -> Iterator[PlanError]:
    """Yield all conflicts, each at the dotted path of a key; those of sizes only if lengths are valid."""
    found = list(length_problems(spec.inputs)) or list(batch_problems(spec.batch, spec.inputs, spec.mesh.dp))
    yield from found
    yield from _auto_problems(spec)
    if not found:
        yield from _batch_problems(spec)
        yield from _size_problems(spec)
    yield from _document_problems(spec)
    yield from _recompute_problems(spec)
    yield from _zero_problems(spec)
    yield from _stage_problems(spec)
    if spec.attention != AUTO and not spec.mesh.has_auto and spec.mesh.cp == 1:
        yield wrong("attention", ": without cp, PyTorch chooses the kernel of attention", "remove it, or set mesh.cp")


def _auto_problems(spec: Spec) -> Iterator[PlanError]:
    """Yield keys that are left to a search although no axis of the mesh is auto."""
    if spec.mesh.has_auto:
        if isinstance(spec.recompute, Mapping):
            fix = "write none, selective, full or auto; or give the sizes of the mesh"
            yield wrong("recompute", ": a search takes one kind for all blocks", fix)
        return
    asked = {
        "batch.micro": (spec.batch.micro, 1),
        "recompute": (spec.recompute, "none"),
        "tensor_parallel.sequence_parallel": (spec.tensor_parallel.sequence_parallel, "false"),
        "pipeline.schedule": (spec.pipeline.schedule, default_kind(1)),
        "optimizer.zero": (spec.optimizer.zero, 1),
    }
    yield from (needs_auto_mesh(path, example) for path, (value, example) in asked.items() if value == AUTO)
    world_size = spec.mesh.to_mesh().world_size if spec.mesh.order != AUTO else spec.devices
    if spec.devices not in (None, world_size):
        what = f" = {spec.devices}, but the mesh has {world_size} ranks"
        yield wrong("devices", what, f"remove it, or set it to {world_size}")


def _batch_problems(spec: Spec) -> Iterator[PlanError]:
    size, micro, dp = spec.batch.global_size, spec.batch.micro, spec.mesh.dp
    if not isinstance(dp, int) or not isinstance(micro, int):
        return
    step = micro * dp
    if size % step:
        nearest = " or ".join(str(n) for n in (size // step * step, -(-size // step) * step) if n)
        what = f" = {size} is not divisible by batch.micro · mesh.dp = {micro} · {dp} = {step}"
        yield wrong("batch.global", what, f"set batch.global to {nearest}, or change batch.micro or mesh.dp")


def _document_problems(spec: Spec) -> Iterator[PlanError]:
    is_told = any(role_of(name, spec.data.inputs) in TELLING for name in spec.inputs)
    if spec.data.packing == "documents" and spec.inputs and not is_told:
        yield SpecError(
            "packing: documents needs an input by which the model knows where a document begins, and it has none",
            where="data.packing",
            fix="add position_ids or document_ids to inputs (or name one by data: {inputs: {NAME: documents}}), or set "
            "packing: false to pad each document",
        )


def _size_problems(spec: Spec) -> Iterator[PlanError]:
    """Yield sizes with more elements in a step than a machine can count and copy."""
    mean, tokens = spec.data.mean_document, tokens_of(spec.longest.inputs)
    if spec.inputs and mean is not None and mean > tokens:
        what = f" is {mean}, and a sequence has {tokens} tokens"
        yield wrong("data.mean_document", what, f"set it to {tokens} or less, or remove it")
    for name, tensor in spec.longest.inputs.items():
        elements = spec.batch.global_size * math.prod(tensor.sizes)
        if elements > _MOST_ELEMENTS:
            what = f": a global batch of {elements:.1e} elements, more than {_MOST_ELEMENTS:.1e}"
            yield wrong(f"inputs.{name}.shape", what, "choose a smaller shape or batch.global")


def _recompute_problems(spec: Spec) -> Iterator[PlanError]:
    kinds = {spec.recompute} if isinstance(spec.recompute, str) else set(spec.recompute.values())
    if kinds - {"none"} and spec.cuda_graphs.impl == "transformer_engine":
        what = ": graphs of transformer_engine cannot replay a forward's random numbers in the backward"
        yield wrong("recompute", what, "set cuda_graphs.impl: local or emulate, or recompute: none")


def _zero_problems(spec: Spec) -> Iterator[PlanError]:
    zero, impl = spec.optimizer.zero, spec.cuda_graphs.impl
    if zero in (2, 3) and impl != "none":
        what = (
            f" = {zero} and cuda_graphs.impl = {impl}: a graph adds gradients at fixed places, and reads weights "
            "there, which have memory only for the time of their use"
        )
        yield wrong("optimizer.zero", what, "set optimizer.zero: 1, or cuda_graphs.impl: none")
    yield from _shard_problems(spec)
    if spec.precision.gather is not None and zero not in (3, AUTO):
        what = f" is for optimizer.zero 3, and it is {zero}"
        yield wrong("precision.gather", what, "set optimizer.zero: 3, or remove it")
    if spec.precision.gather is not None and spec.precision.parameters in ("bfloat16", "float16"):
        what = f" = {spec.precision.gather} is no smaller than {spec.precision.parameters} parameters"
        yield wrong("precision.gather", what, "remove it")
    reshard = spec.optimizer.reshard
    if reshard not in (True, AUTO) and zero not in (3, AUTO):
        what = f" = {str(reshard).lower()} is for zero 3, and optimizer.zero is {zero}"
        yield wrong("optimizer.reshard", what, "set optimizer.zero: 3, or remove it")


def _shard_problems(spec: Spec) -> Iterator[PlanError]:
    at, fix = "optimizer.shard_group", "remove it"
    if spec.optimizer.shard_group is None:
        return
    if spec.optimizer.zero == 0:
        yield wrong(at, ": with zero 0 nothing is in shards", fix)
    if spec.mesh.has_auto:
        yield wrong(at, ": a search shards over all ranks of dp", f"{fix}, or give all sizes")
    if MATRIX_RULES & spec.optimizer.rules:
        yield wrong(at, ": muon gathers matrices over all ranks of dp", fix)


def _stage_problems(spec: Spec) -> Iterator[PlanError]:
    pp, vpp, schedule, split = spec.mesh.pp, spec.mesh.vpp, spec.pipeline.schedule, spec.pipeline.split
    if isinstance(schedule, Schedule):
        yield from _by_hand_problems(spec, schedule)
    elif vpp not in (1, AUTO) and schedule != AUTO and not KINDS[schedule].runs_chunks:
        what = f" = {vpp} needs an interleaved schedule, but pipeline.schedule is {schedule}"
        yield wrong("mesh.vpp", what, f"set pipeline.schedule: {default_kind(2)}, or mesh.vpp: 1")
    elif AUTO not in (pp, vpp, schedule) and KINDS[schedule].waits:
        try:
            KINDS[schedule].check(Sizes(int(pp), 1, int(vpp), int(pp)))
        except PlanError as error:
            yield error
    if AUTO not in (pp, vpp):
        yield from stage_problems(split, int(pp), int(vpp))


def _by_hand_problems(spec: Spec, schedule: Schedule) -> Iterator[PlanError]:
    """Yield sizes of a schedule by hand that differ from those of the spec, at each length."""
    at = "pipeline.schedule"
    if spec.mesh.has_auto or spec.batch.micro == AUTO:
        what = ": a schedule by hand is for one mesh and one number of microbatches, and a search chooses them"
        yield wrong(at, what, f"write the sizes of the mesh and batch.micro, or {at}: auto")
        return
    if spec.pipeline.group_size is not None:
        yield wrong("pipeline.group_size", ": a schedule by hand has no groups", "remove it")
    own = schedule.pp, schedule.vpp, schedule.num_microbatches
    for length in spec.lengths or (None,):
        one = spec if length is None else spec.at(spec.lengths.index(length))
        asked = spec.mesh.pp, spec.mesh.vpp, one.num_microbatches
        if asked != own:
            words = ["pp {}, vpp {}, {} microbatches".format(*sizes) for sizes in (own, asked)]
            of_length = "" if length is None else f" at length {length}"
            what = f": the schedule is for {words[0]}, and the spec has {words[1]}{of_length}"
            yield wrong(at, what, "write a schedule of the spec's sizes, or change mesh and batch")
            return


def with_auto(value: Any) -> Any:
    """Return the values of a spec, with auto for the keys that the search decides. Malformed values stay unchanged."""
    mesh = value.get("mesh") if isinstance(value, Mapping) else None
    if mesh == AUTO:
        return {"recompute": AUTO, **_filled_auto(value, WITH_ALL)}
    if isinstance(mesh, Mapping) and any(mesh.get(axis) == AUTO for axis in SIZES):
        return _filled_auto(value, WITH_MICRO)
    return value


def _filled_auto(value: Mapping[str, Any], keys: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    filled = dict(value)
    for section, name in keys:
        given = filled.get(section, None if section == "batch" else {})  # without a batch there is an error to come
        if isinstance(given, Mapping):
            filled[section] = {name: AUTO, **given}
    return filled
