"""Blocks of one kind that the spec's overrides treat differently are decided apart: each group has its own first block.

    overrides {"h.0.mlp.up": replicate}      h.0 alone is a kind; h.2 … repeat h.1
    overrides {"h.*.mlp.up": replicate}      all repeat h.0, as without overrides
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from planner.blocks import Blocks
from planner.program import Program


def is_meant(program: Program, fqn: str, pattern: str) -> bool:
    """Whether an override's glob names the parameter, its module, or another name that it is tied to."""
    names = [fqn, *(a for a, first in program.aliases.items() if first == fqn)]
    return any(fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern) for n in names)


def kinds_by_override(program: Program, blocks: Blocks, patterns: Iterable[str]) -> Blocks:
    """``blocks`` whose ``representative`` only joins what the same overrides name."""
    patterns = tuple(patterns)
    named = {name: tuple(p for p in patterns if is_meant(program, fqn, p)) for name, fqn in program.parameters.items()}
    if not any(named.values()):
        return blocks
    same, leaders = dict(blocks.representative), {}
    for block, members in zip(blocks.instances, _members(program, blocks), strict=True):
        asked = tuple(sorted((inner, named[own]) for inner, own in members.items() if named.get(own)))
        leader = leaders.setdefault((block.kind, asked), members)
        same.update((own, leader[inner]) for inner, own in members.items())
    return replace(blocks, representative=same)


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
