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
from planner.sharding.boxes import Box, Ranges, runs_in
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.manifest import WITH_NAMES, Manifest
from runtime.checkpoint.safetensors_files import SINGLE

Read = Callable[[str, Box, Tensor], object]  # (name of a source, its elements, where they belong)
Range = tuple[int, int]
MAX_SHARD_BYTES = 5_000_000_000
T = TypeVar("T")
NAMES = ("hf", "model")


def read_ranges(target: Tensor, made: Assembly, ranges: Ranges, read: Read) -> None:
    """Copy the ``ranges`` of each dim, concatenated, to ``target``; padding is not written."""
    for local, box in runs_in(ranges, Box.whole(made.shape)):
        read_into(target[local], made, box, read)


def read_into(target: Tensor, made: Assembly, box: Box, read: Read) -> None:
    """Copy ``box`` of ``made`` to ``target``, which has the shape of the box; cast to the dtype of ``target``."""
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
    """Read a view group by group (``_groups``); for a group that splits or joins dims, full rows of its first dim."""
    outer, inner = made.shape, made.whole.shape
    start, stop, strides = [0] * len(inner), list(inner), [1] * len(outer)
    # position of the box in the values that are read: first element, and stride of the next group
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
    values = target.new_empty(part.shape)
    read_into(values, made.whole, part, read)
    target.copy_(values.as_strided(box.shape, strides, first))


def _groups(outer: Shape, inner: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, in order, the smallest groups of dims of both shapes that have equal numbers of elements."""
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
    def value(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return list(map(value, argument))
        if not isinstance(argument, Assembly):
            return argument
        tensor = target.new_empty(argument.shape)
        read_into(tensor, argument, Box.whole(argument.shape), read)
        return tensor

    result = allowed.op(made.op)(*map(value, made.args))
    return result if isinstance(result, Tensor) else result[made.index]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. ``row``: the parameter that stages hold; None for a tensor that rank 0 holds. ``made``: the
    assembly of the model's tensors, if it is not one of them. ``aliases``: other names of a tied parameter.
    """

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
        """Return the sort key in a file. Wide dtypes come first: each tensor is then aligned to its element size, as
        readers that map files expect.
        """
        return -self.dtype.itemsize


def files_of(entries: Iterable[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """Return file name → tensors, in order, at most ``max_bytes`` per file unless one tensor is larger.

    Raises PlanError if ``max_bytes`` is less than 1.
    """
    if max_bytes < 1:
        raise PlanError(f"max_shard_bytes is {max_bytes}", fix="give a positive number of bytes")
    parts = filled(entries, lambda entry: entry.num_bytes, max_bytes) or [[]]
    return {file_name(i, len(parts)): sorted(part, key=Entry.by_width) for i, part in enumerate(parts)}


def file_name(number: int, count: int) -> str:
    """Return the name of file ``number`` (from 0) of ``count``."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def filled(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Return ``items`` in order, in parts of at most ``most`` bytes unless one item is larger."""
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
    """Return stored name → assembly of the model's tensors, the inverse of ``made`` (with all copies of tied ones)."""
    tensors = dict(made)
    names = inverted({name: copies[0] for name, copies in tensors.items()})
    for name, (_, *others) in tensors.items():
        for other in others:
            names |= inverted({name: other})
    return {plain_name(name): assembly for name, assembly in names.items()}


def stored_names(hub: HubFormat, loaded: Mapping[str, Assembly]) -> dict[str, Assembly]:
    """Return ``loaded``, and transformers' names of tensors that were not loaded, if they differ from the model's."""
    covered = {source.name for made in loaded.values() for source in sources(made)}
    others = hub.stored_names.items()
    return {**loaded, **{n: made for n, made in others if not any(s.name in covered for s in sources(made))}}


def json_of_names(names: Mapping[str, Assembly]) -> dict[str, Any]:
    """Return the names as JSON, without tensors that keep their name."""
    return {name: to_json(made) for name, made in names.items() if made != Source(name, made.shape)}


def names_in(manifest: Manifest) -> dict[str, Assembly]:
    """Return the names of the Hub in a save, and its tensors' own names; nothing for a save without names."""
    names = manifest.names
    covered = {source.name for made in names.values() for source in sources(made)}
    own = manifest.tensors.items() if manifest.version >= WITH_NAMES else ()
    return names | {name: Source(name, entry.shape) for name, entry in own if name not in covered}


def hub_entries(entries: Iterable[Entry], names: Mapping[str, Assembly]) -> list[Entry]:
    """Return the stored tensors of ``names``, and ``entries`` that are in none of them, in the model's order."""
    own = {entry.name: (place, entry) for place, entry in enumerate(entries)}
    placed: list[tuple[int, Entry]] = []
    for name, made in names.items():
        parts = [source.name for source in sources(made)]
        if parts and own.keys() >= {*parts}:
            place, first = own[parts[0]]
            placed.append((place, Entry(name, made.shape, first.dtype, made=made)))
    used = {source.name for _, entry in placed for source in sources(entry.made)}
    placed += [(place, entry) for place, entry in own.values() if entry.name not in used]
    return [entry for _, entry in sorted(placed, key=lambda each: each[0])]


def made_tensor(entry: Entry, read: Read, *, leads: bool = True) -> Tensor | None:
    """Return the tensor of an entry where ``leads``, None elsewhere. All ranks must call it: ``read`` is collective."""
    target = torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if leads else "meta")
    read_into(target, entry.made or Source(entry.name, entry.shape), Box.whole(entry.shape), read)
    return target if leads else None


def by_any_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return entries by their names and aliases."""
    return {name: entry for entry in entries for name in (entry.name, *entry.aliases)}


def gathered(
    entries: Mapping[str, Entry], read: Read, names: Iterable[str], *, leads: bool = True
) -> dict[str, Tensor]:
    """Return full tensors by name where ``leads``, ``{}`` elsewhere. All ranks must call it with the same names."""
    chosen = {name: entries[name] for name in names}
    tensors = {entry.name: made_tensor(entry, read, leads=leads) for entry in chosen.values()}
    return {name: value for name, entry in chosen.items() if (value := tensors[entry.name]) is not None}


def reading_whole(full: Callable[[str], Tensor | None]) -> Read:
    """Return a ``Read`` that makes full tensors and copies boxes of them; the last tensor is kept.

    ``full``: returns a tensor of the model by name, None on a rank that does not lead.
    """
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
    """Yield the tensors of ``files``, one after another."""
    for entries in files.values():
        for entry in entries:
            yield made_tensor(entry, read, leads=leads)
