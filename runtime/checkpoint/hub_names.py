"""Names and tensors of files on the way out: those of the directory that was loaded, else of transformers' own saves.

names of the Hub      each stored tensor as an assembly of the model's, made one at a time: an expert, not the stack
names of the model    each tensor of the model under its own name
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.hub.assembly import Assembly, Source, inverted, sources, to_json
from planner.capture.model.compiled import plain_name
from planner.capture.model.hub_format import HubFormat
from planner.sharding.boxes import Box
from runtime.checkpoint.assembled import Read, read_into, whole_box
from runtime.checkpoint.entries import Entry
from runtime.checkpoint.manifest import WITH_NAMES, Manifest

NAMES = ("hf", "model")


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
    read_into(target, entry.made or Source(entry.name, entry.shape), whole_box(entry.shape), read)
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
            target.copy_(value[tuple(map(slice, box.start, box.stop))])

    return read


def made_tensors(files: Mapping[str, list[Entry]], read: Read, *, leads: bool = True) -> Iterator[Tensor | None]:
    """Every tensor of ``files``, one after another."""
    for entries in files.values():
        for entry in entries:
            yield made_tensor(entry, read, leads=leads)
