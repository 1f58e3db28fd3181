"""Names and tensors of files on the way out: those of the directory that was loaded, else of transformers' own saves.

names of the Hub      each stored tensor as an assembly of the model's, made one at a time: an expert, not the stack
names of the model    each tensor of the model under its own name

Of an assembly, only the elements of its sources that a part has are read, straight into their place; for a view the
rows that have elements of the part, and for a call every source in full, in memory of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.assembly import (
    Assembly,
    Call,
    Cat,
    Permute,
    Shape,
    Slice,
    Source,
    View,
    inverse,
    inverted,
    sources,
    to_json,
)
from planner.capture.model.eager import plain_name
from planner.capture.model.hub_format import HubFormat
from planner.files import allowed
from planner.sharding.boxes import Box, Ranges, pieces
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.manifest import WITH_NAMES, Manifest
from runtime.checkpoint.safetensors_files import SINGLE

Read = Callable[[str, Box, Tensor], object]  # (name of a source, its elements, where they belong)
Range = tuple[int, int]
MAX_SHARD_BYTES = 5_000_000_000
T = TypeVar("T")
NAMES = ("hf", "model")


def read_ranges(target: Tensor, made: Assembly, ranges: Ranges, read: Read) -> None:
    """The ``ranges`` of each dim, one after another; beyond the tensor is padding: its place in ``target`` stays."""
    for whole, local in pieces(ranges):
        place, box = target, Box.whole(made.shape)
        for dim, (start, stop) in whole.items():
            stop = min(stop, made.shape[dim])
            place = place.narrow(dim, local[dim][0], max(stop - start, 0))
            box = _with(box, dim, start, stop)
        if place.numel():
            read_into(place, made, box, read)


def read_into(target: Tensor, made: Assembly, box: Box, read: Read) -> None:
    """Copy ``box`` of ``made`` to ``target``, which has its shape; casts to the dtype of ``target``."""
    if isinstance(made, Source):
        read(made.name, box, target)
    elif isinstance(made, Cat):
        _read_cat(target, made, box, read)
    elif isinstance(made, Slice):
        start, stop = box.start[made.dim] + made.start, box.stop[made.dim] + made.start
        read_into(target, made.whole, _with(box, made.dim, start, stop), read)
    elif isinstance(made, Permute):
        back = inverse(made.dims)
        inner = Box(tuple(box.start[dim] for dim in back), tuple(box.stop[dim] for dim in back))
        read_into(target.permute(back), made.whole, inner, read)
    elif isinstance(made, View):
        _read_view(target, made, box, read)
    else:
        target.copy_(_called(made, target, read)[box.slices_in(Box.whole(made.shape))])


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))


def _read_cat(target: Tensor, made: Cat, box: Box, read: Read) -> None:
    dim, offset = made.dim, 0
    for part in made.parts:
        size = part.shape[dim]
        first, last = max(box.start[dim], offset), min(box.stop[dim], offset + size)
        if first < last:
            place = target.narrow(dim, first - box.start[dim], last - first)
            read_into(place, part, _with(box, dim, first - offset, last - offset), read)
        offset += size


def _read_view(target: Tensor, made: View, box: Box, read: Read) -> None:
    """Dims that only the shapes split or join are a group; of one, the rows of its first dim are read in full."""
    outer, inner = made.shape, made.whole.shape
    start, stop, strides = [0] * len(inner), list(inner), [1] * len(outer)
    # of the box in what is read: its first element, and the stride of the next group
    first, unit, is_plain = 0, 1, True
    for own, others in reversed(list(_groups(outer, inner))):
        wide = [dim for dim in own if outer[dim] != 1], [dim for dim in others if inner[dim] != 1]
        if len(wide[0]) <= 1 and [outer[d] for d in wide[0]] == [inner[d] for d in wide[1]]:
            for dim, other in zip(*wide, strict=True):
                start[other], stop[other], strides[dim] = box.start[dim], box.stop[dim], unit
                unit *= stop[other] - start[other]
            continue
        row, other_row = prod(outer[dim] for dim in own[1:]), prod(inner[dim] for dim in others[1:])
        begin, end = box.start[own[0]] * row, box.stop[own[0]] * row
        start[others[0]], stop[others[0]] = begin // other_row, -(-end // other_row)
        is_plain, stride = False, unit
        for dim in reversed(own):
            strides[dim], first, stride = stride, first + box.start[dim] * stride, stride * outer[dim]
        first -= start[others[0]] * other_row * unit
        unit *= (stop[others[0]] - start[others[0]]) * other_row
    part = Box(tuple(start), tuple(stop))
    if is_plain:
        read_into(target.view(part.shape), made.whole, part, read)
        return
    held = target.new_empty(part.shape)
    read_into(held, made.whole, part, read)
    target.copy_(held.as_strided(box.shape, strides, first))


def _groups(outer: Shape, inner: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Dims of both shapes that have the same number of elements, the fewest together; in order."""
    i = j = 0
    while i < len(outer) or j < len(inner):
        own, others, sizes = [], [], [1, 1]
        while True:
            if sizes[0] <= sizes[1] and i < len(outer) and (sizes[0] < sizes[1] or not own):
                sizes[0] *= outer[i]
                own.append(i)
                i += 1
            elif j < len(inner) and (sizes[1] < sizes[0] or not others):
                sizes[1] *= inner[j]
                others.append(j)
                j += 1
            else:
                break
        yield own, others


def _called(made: Call, target: Tensor, read: Read) -> Tensor:
    def value(given: Any) -> Any:
        if isinstance(given, tuple):
            return list(map(value, given))
        if not isinstance(given, Assembly):
            return given
        held = target.new_empty(given.shape)
        read_into(held, given, Box.whole(given.shape), read)
        return held

    result = allowed.op(made.op)(*map(value, made.args))
    return result if isinstance(result, Tensor) else result[made.index]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. ``row``: the parameter that stages hold; None for a tensor that rank 0 holds. ``made``: how it is
    made of the model's tensors, if it is none of these. ``aliases``: other names of a tied parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: ParameterPlan | None = None
    made: Assembly | None = None
    aliases: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def by_width(self) -> int:
        """Its place in a file. Wide types first: every tensor then starts at a multiple of its element's size, as
        readers that map files expect."""
        return -self.dtype.itemsize


def files_of(entries: Iterable[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """File name → its tensors: filled in order up to ``max_bytes``, more only for a tensor that is larger alone."""
    if max_bytes < 1:
        raise PlanError(f"max_shard_bytes is {max_bytes}", fix="give a positive number of bytes")
    parts = filled(entries, lambda entry: entry.num_bytes, max_bytes) or [[]]
    return {file_name(i, len(parts)): sorted(part, key=Entry.by_width) for i, part in enumerate(parts)}


def file_name(number: int, count: int) -> str:
    """Of ``count`` files, counted from 0."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def filled(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """``items`` in parts that are filled up to ``most`` bytes; more only for an item that is larger alone."""
    parts: list[list[T]] = []
    size = 0
    for item in items:
        more = num_bytes(item)
        if not parts or size + more > most:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += more
    return parts


def check_names(names: str, allowed: tuple[str, ...] = NAMES) -> None:
    if names not in allowed:
        raise PlanError(f"unknown names {names!r}", where="names", fix=f"choose one of: {', '.join(allowed)}")


def names_of_files(made: Iterable[tuple[str, tuple[Assembly, ...]]]) -> dict[str, Assembly]:
    """Stored name → how it is made of the model's tensors, for files that make these: of a tied one every copy."""
    tensors = dict(made)
    found = inverted({name: copies[0] for name, copies in tensors.items()})
    for name, (_, *others) in tensors.items():
        for other in others:
            found |= inverted({name: other})
    return {plain_name(name): assembly for name, assembly in found.items()}


def stored_names(hub: HubFormat, loaded: Mapping[str, Assembly]) -> dict[str, Assembly]:
    """``loaded``, and transformers' names for tensors that were not loaded, unless it is their own name."""
    covered = {source.name for made in loaded.values() for source in sources(made)}
    others = hub.stored_names.items()
    return {**loaded, **{n: made for n, made in others if not any(s.name in covered for s in sources(made))}}


def json_of_names(names: Mapping[str, Assembly]) -> dict[str, Any]:
    """Without tensors that have their own name."""
    return {name: to_json(made) for name, made in names.items() if made != Source(name, made.shape)}


def names_in(manifest: Manifest) -> dict[str, Assembly]:
    """Of a save: those of its files, and its tensors' own; nothing of a save without names."""
    names = manifest.names
    covered = {source.name for made in names.values() for source in sources(made)}
    own = manifest.tensors.items() if manifest.version >= WITH_NAMES else ()
    return names | {name: Source(name, entry.shape) for name, entry in own if name not in covered}


def hub_entries(entries: Iterable[Entry], names: Mapping[str, Assembly]) -> list[Entry]:
    """The stored tensors of ``names``, and those of ``entries`` that none is made of, in the model's order."""
    held = {entry.name: (place, entry) for place, entry in enumerate(entries)}
    found: list[tuple[int, Entry]] = []
    for name, made in names.items():
        parts = [held[source.name] for source in sources(made) if source.name in held]
        if parts and all(source.name in held for source in sources(made)):
            found.append((parts[0][0], Entry(name, made.shape, parts[0][1].dtype, made=made)))
    used = {source.name for _, entry in found for source in sources(entry.made)}
    found += [(place, entry) for place, entry in held.values() if entry.name not in used]
    return [entry for _, entry in sorted(found, key=lambda each: each[0])]


def made_tensor(entry: Entry, read: Read, *, leads: bool = True) -> Tensor | None:
    """The tensor of one entry where ``leads``, None elsewhere; ``read`` is called alike on all ranks."""
    target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if leads else "meta")
    read_into(target, entry.made or Source(entry.name, entry.shape), Box.whole(entry.shape), read)
    return target if leads else None


def reading_whole(full: Callable[[str], Tensor | None]) -> Read:
    """``full``: makes one tensor of the model entirely, None on a rank that does not lead; the last one is kept."""
    last: list[tuple[str, Tensor | None]] = [("", None)]

    def read(name: str, box: Box, target: Tensor) -> None:
        if last[0][0] != name:
            last[0] = "", None
            last[0] = name, full(name)
        value = last[0][1]
        if value is not None:
            target.copy_(value[box.slices])

    return read


def made_tensors(files: Mapping[str, list[Entry]], read: Read, *, leads: bool = True) -> Iterator[Tensor | None]:
    """Every tensor of ``files``, one after another."""
    for entries in files.values():
        for entry in entries:
            yield made_tensor(entry, read, leads=leads)
