"""The override of each parameter, and the kinds of blocks that follow from it.

    {"*.mlp.*": replicate, "h.0.mlp.up": column}     of the globs that name a parameter the last one decides
    {"wte": vocab, "lm_head": replicate}             of one tied weight: refused, the first would decide nothing

Blocks of one kind that the overrides treat differently are decided apart: each group has its own first block.

    overrides {"h.0.mlp.up": replicate}      h.0 alone is a kind; h.2 … repeat h.1
    overrides {"h.*.mlp.up": replicate}      all repeat h.0, as without overrides
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from passes.blocks.blocks import Blocks
from passes.errors import PlanError
from passes.program.program import Program


@dataclass(frozen=True, slots=True)
class Asked:
    """The override of one parameter: its glob, and its style."""

    pattern: str
    style: str

    @property
    def path(self) -> str:
        """Its place in the spec."""
        return f"tensor_parallel.overrides.{self.pattern}"


def is_meant(program: Program, fqn: str, pattern: str) -> bool:
    """Whether an override's glob names the parameter, its module, or another name that it is tied to."""
    names = [fqn, *(a for a, first in program.aliases.items() if first == fqn)]
    return any(fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern) for n in names)


def asked_of(program: Program, overrides: Mapping[str, str]) -> dict[str, Asked]:
    """Placeholder → the override that decides it. Raises PlanError for a glob that names nothing, or decides nothing
    because later ones ask for another style of all that it names."""
    found: dict[str, Asked] = {}
    for pattern, style in overrides.items():
        hits = [name for name, fqn in program.parameters.items() if is_meant(program, fqn, pattern)]
        if not hits:
            _matches_nothing(program, pattern)
        found |= dict.fromkeys(hits, Asked(pattern, style))
    for pattern, style in overrides.items():
        hits = [name for name, fqn in program.parameters.items() if is_meant(program, fqn, pattern)]
        if all(found[name].style != style for name in hits):
            later = found[hits[0]]
            raise PlanError(
                f"tensor_parallel.overrides: `{pattern}: {style}` has no effect: `{later.pattern}: {later.style}` "
                f"comes later and matches {program.parameters[hits[0]]} too",
                where=Asked(pattern, style).path,
                fix="remove one of the two, or write the narrower glob last (names of a tied weight are one parameter)",
            )
    return found


def _matches_nothing(program: Program, pattern: str) -> None:
    names = sorted({f.rpartition(".")[0] for f in program.parameters.values()})
    raise PlanError(
        f"tensor_parallel.overrides: `{pattern}` matches no parameter",
        where=Asked(pattern, "").path,
        fix=f"use a glob over dotted names such as {names[0]}" if names else "the model has no parameters",
    )


def kinds_by_override(program: Program, blocks: Blocks, overrides: Mapping[str, str]) -> Blocks:
    """``blocks`` with a ``representative`` that only joins blocks with equal overrides."""
    asked = asked_of(program, overrides)
    if not asked:
        return blocks
    same, leaders = dict(blocks.representative), {}
    for block, members in zip(blocks.instances, _members(program, blocks), strict=True):
        styles = tuple(_styles(members, asked))
        leader = leaders.setdefault((block.kind, styles), members)
        same.update((own, leader[inner]) for inner, own in members.items())
    return replace(blocks, representative=same)


def _styles(members: dict[str, str], asked: Mapping[str, Asked]) -> Iterator[tuple[str, Asked]]:
    for inner, own in sorted(members.items()):
        if own in asked:
            yield inner, asked[own]


def _members(program: Program, blocks: Blocks) -> list[dict[str, str]]:
    """For each block: node of the first block of its kind → its own node, with the parameters that it alone reads."""
    block_of = blocks.block_of()
    members = [{blocks.representative[name]: name for name in block.nodes} for block in blocks.instances]
    for name in program.parameters:
        reading = {block_of.get(user.name) for user in program.node(name).users}
        index = reading.pop() if len(reading) == 1 else None
        if index is not None:
            members[index][blocks.representative[name]] = name
    return members
