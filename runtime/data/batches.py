"""The batch of a step: checked against the plan before any communication, then cut into this rank's microbatches.

    dp rank d           rows [d·G/dp, (d+1)·G/dp) of the global batch
    its microbatch m    ``micro`` of these rows, from row m·micro

Two more checks run on the host: the checks that the model's forward makes in Python, which the captured graph does not
contain; and ids and labels against the ranges of the model's lookups. On a GPU, an id out of range is a device-side
assert: a late error that does not name the id and leaves the process unusable.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from passes.program.program import Assumption
from planner.capture.forms import PLAIN, Form, Forms, in_rows
from runtime.distributed.agreement import agreed, unlike_rank_0
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import listed


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout that a batch must have. ``inputs``: name -> (shape of one sequence, dtype).

    ``computed``: input -> dtype in which the graph reads it, if precision casts the user's floats. ``ids``: input ->
    the integers that it may hold. ``assumptions``: checks of the forward that every microbatch must pass. ``lengths``:
    all lengths of a plan with several; ``inputs`` have the greatest. ``forms``: forms of inputs that are not rows.
    """

    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    global_size: int
    micro: int
    dp: int
    dp_rank: int
    computed: dict[str, torch.dtype] = field(default_factory=dict)
    ids: Mapping[str, tuple[IdRange, ...]] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    lengths: tuple[int, ...] = ()
    forms: Forms = ()

    @property
    def local_size(self) -> int:
        return self.global_size // self.dp

    @property
    def num_microbatches(self) -> int:
        return self.local_size // self.micro

    @property
    def first_microbatch(self) -> int:
        """Global index of this dp rank's first microbatch."""
        return self.dp_rank * self.num_microbatches

    def check(self, batch: Mapping[str, Tensor], *, local: bool = False) -> None:
        """Raise PlanError unless keys, shapes, dtypes and ids match the plan.

        ``batch``: rows of the global batch; with ``local`` the rows of this dp rank alone.
        """
        if not isinstance(batch, Mapping):
            raise PlanError(
                f"the batch is a {type(batch).__name__}", where="batch", fix="give a dict of tensors by name"
            )
        size = self.local_size if local else self.global_size
        missing, extra = self.inputs.keys() - batch.keys(), batch.keys() - self.inputs.keys()
        if missing or extra:
            parts = [
                f"{word} {', '.join(sorted(names))}"
                for word, names in (("lacks", missing), ("has the unplanned", extra))
                if names
            ]
            raise PlanError(
                f"the batch {' and '.join(parts)}", where="batch", fix=f"give exactly: {', '.join(self.inputs)}"
            )
        for name, (shape, dtype) in self.inputs.items():
            value = batch[name]
            if not isinstance(value, Tensor):
                raise PlanError(f"batch[{name!r}] is a {type(value).__name__}", where="batch", fix="give tensors")
            if tuple(value.shape) != (size, *shape):
                raise self._unlike(name, value, size, shape, local)
            if value.dtype != dtype:
                what = f"batch[{name!r}] is {value.dtype}, the plan expects {dtype}"
                raise PlanError(what, where="batch", fix=f"convert it to {dtype}")
            check_ids(name, value, self.ids.get(name, ()))
            check_value(name, value, dict(self.forms).get(name, PLAIN))
        check_assumptions(batch, self.assumptions, self.micro)

    def planned(self, batch: Any) -> Any:
        """Return the tensors of a batch that the plan reads; anything but a dict as is, for ``check`` to report."""
        return {n: x for n, x in batch.items() if n in self.inputs} if isinstance(batch, Mapping) else batch

    def in_rows(self, batch: Any) -> Any:
        """Return a user's batch with one row of each input per sequence."""
        return in_rows(self.forms, batch, {name: shape for name, (shape, _) in self.inputs.items()})

    def _unlike(self, name: str, value: Tensor, size: int, shape: tuple[int, ...], local: bool) -> PlanError:
        form = dict(self.forms).get(name, PLAIN)
        is_in_rows = value.dim() == 1 + len(shape)
        actual = form.shape(len(value), tuple(value.shape[1:])) if is_in_rows else list(value.shape)
        what = f"batch[{name!r}] has shape {actual}, the plan expects {form.shape(size, shape)}"
        if form.joined:
            what += f": {shape[0]} rows for each of {size} sequences"
        of = "of this dp rank" if local else "of the global batch"
        fix = f"give the {size} sequences {of}, each of shape {list(shape)}"
        if self.lengths:
            fix = f"pad every sequence to the next planned length, of {', '.join(map(str, self.lengths))}"
        return PlanError(what, where="batch", fix=f"{fix}; or plan for this shape")

    def microbatches(
        self, batch: Mapping[str, Tensor], names: Iterable[str], device: torch.device, *, local: bool = False
    ) -> list[dict[str, Tensor]]:
        """Return this dp rank's microbatches of the inputs ``names``, on ``device``."""
        first = 0 if local else self.dp_rank * self.local_size
        return self._cut({name: batch[name][first : first + self.local_size] for name in names}, device)

    def all_microbatches(
        self, batch: Mapping[str, Tensor], names: Iterable[str], device: torch.device
    ) -> list[dict[str, Tensor]]:
        """Return all microbatches of the global batch, in the order of their global indices."""
        return self._cut({name: batch[name] for name in names}, device)

    def _cut(self, rows: Mapping[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
        if not rows:  # a stage may read only tensors of other stages
            return [{}] * self.num_microbatches
        placed = {name: _placed(value, device, self.computed.get(name, value.dtype)) for name, value in rows.items()}
        pieces = {name: value.split(self.micro) for name, value in placed.items()}
        return [dict(zip(pieces, microbatch, strict=True)) for microbatch in zip(*pieces.values(), strict=True)]


def _placed(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the value on ``device`` in ``dtype``. The host does not wait for a copy to a GPU: its memory is pinned."""
    if device.type == "cuda" and value.device.type == "cpu":
        return value.to(dtype).pin_memory().to(device, non_blocking=True)
    return value.to(device, dtype)


def num_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return the number of elements of the first integer input, or of sequences if there is none."""
    integers = [t for t in batch.values() if not t.is_floating_point() and t.dtype != torch.bool]
    return integers[0].numel() if integers else len(next(iter(batch.values())))


def check_assumptions(batch: Mapping[str, Tensor], assumptions: Iterable[Assumption], micro: int) -> None:
    """Raise PlanError at the line of the first check that a microbatch fails. Tensors on a device are not checked."""
    for assumption in assumptions:
        condition = assumption.condition
        if condition is None or any(batch[name].device.type != "cpu" for name, _ in condition.inputs):
            continue
        size = len(next(iter(batch.values())))
        for start in range(0, size, micro):
            rows = {name: batch[name][start : start + micro] for name, _ in condition.inputs}
            if not condition.holds(rows):
                raise PlanError(
                    f"the batch fails a check of the model's forward, in rows {start} to {start + micro - 1}: "
                    f"{assumption.what.replace('does not raise', 'raises')}",
                    where=assumption.where,
                    fix="give a batch that the unmodified model accepts",
                )


def check_ids(name: str, value: Tensor, ranges: Iterable[IdRange]) -> None:
    """Raise PlanError that names the first value out of range and its place. Tensors on a device are not checked."""
    if value.device.type != "cpu":
        return
    for ids in ranges:
        part = value[(slice(None), *(slice(start, stop) for start, stop in ids.part))]
        if not part.numel():
            continue
        least, most = (int(v) for v in torch.aminmax(part))
        if ids.low <= least and most < ids.high:
            continue
        bad = (part < ids.low) | (part >= ids.high)
        if ids.skipped is not None:
            bad &= part != ids.skipped
        if bad.any():
            raise _out_of_range(name, part, bad.nonzero()[0], ids)


def check_value(name: str, value: Tensor, form: Form) -> None:
    """Raise PlanError if a sequence differs from the input's planned value. Tensors on a device are not checked."""
    if form.value is None or value.device.type != "cpu":
        return
    differs = (value != form.tensor).flatten(1).any(1) if value.dim() > 1 else value != form.tensor
    if differs.any():
        sample = int(differs.nonzero()[0])
        raise PlanError(
            f"batch[{name!r}] of sequence {sample} is {value[sample].tolist()}, and the plan was made for "
            f"{form.tensor.tolist()} in every sequence",
            where="batch",
            fix=f"bring all to the planned number and size, or plan with another inputs.{name}.value",
        )


def _out_of_range(name: str, part: Tensor, place: Tensor, ids: IdRange) -> PlanError:
    value = int(part[tuple(place)])
    shown = [int(place[0]), *(int(i) + start for i, (start, _) in zip(place[1:], ids.part, strict=True))]
    besides = "" if ids.skipped is None else f", and skips {ids.skipped}"
    noun = "labels" if ids.unit == "classes" else "ids"
    return PlanError(
        f"batch[{name!r}] holds {value} at {shown}; {ids.what} has {ids.unit} 0 to {ids.high - 1}{besides}",
        where="batch",
        fix=f"use {noun} in this range, or a model with more {ids.unit} (its vocabulary is smaller than that of the "
        "data)",
    )


class BatchChecks:
    """Checks of the batches of one rank.

    The ranks check the first batch together: a rank with a bad batch must not leave the others waiting in a step. A
    global batch must then hold the same integers on every rank.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups, self._is_first = groups, True

    def check(self, layout: BatchLayout, batch: Mapping[str, Tensor], *, local: bool) -> None:
        """Raise PlanError if the batch does not match the plan; for the first batch on every rank."""
        groups, is_first, self._is_first = self._groups, self._is_first, False
        if not is_first:
            return check_here(layout, batch, groups.rank, groups.mesh.world_size, local=local)
        with agreed(groups):
            check_here(layout, batch, groups.rank, groups.mesh.world_size, local=local)
        integers = {name: value for name, value in batch.items() if not value.is_floating_point()}
        if odd := unlike_rank_0(groups, "" if local else digest_of(integers)):
            fix = "give every rank the same global batch, or its own rows with train_step(batch, local=True)"
            raise PlanError(f"the first batch of {listed(odd)} differs from that of rank 0", where="batch", fix=fix)


def check_here(layout: BatchLayout, batch: Mapping[str, Tensor], rank: int, world_size: int, *, local: bool) -> None:
    """Check this rank's batch; with several ranks, an error names the rank."""
    try:
        layout.check(batch, local=local)
    except PlanError as error:
        if world_size == 1:
            raise
        raise PlanError(f"rank {rank}: {error.what}", where=error.where, fix=error.fix) from None


def digest_of(batch: Mapping[str, Tensor]) -> str:
    """Return a hash of the bytes of all tensors."""
    digest = xxhash.xxh3_128()
    for name in sorted(batch):
        digest.update(batch[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
