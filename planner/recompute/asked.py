"""The kind of ``recompute`` that the spec gives each block: one for all, or globs over dotted names of blocks.

full                                    all blocks
{"h.*": selective, "h.[0-3]": full}     of the globs that name a block the last one decides; of the others: none
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from passes.blocks.blocks import Blocks
from passes.errors import PlanError

NONE, FULL, SELECTIVE = "none", "full", "selective"


def kinds_of_blocks(asked: str | Mapping[str, str], blocks: Blocks) -> dict[int, str]:
    """Index of each recomputed block → its kind. Raises PlanError for a glob that names no block."""
    paths = [block.path for block in blocks.instances]
    globs = {"*": asked} if isinstance(asked, str) else asked
    if globs and set(globs.values()) != {NONE} and not paths:
        raise PlanError(
            "recompute: the model has no repeated blocks", where="recompute", fix="set recompute: none, or remove it"
        )
    found: dict[int, str] = {}
    for pattern, kind in globs.items():
        hits = [block.index for block in blocks.instances if fnmatchcase(block.path, pattern)]
        if not hits and not isinstance(asked, str):
            raise _matches_nothing(pattern, paths)
        found |= dict.fromkeys(hits, kind)
    return {index: kind for index, kind in found.items() if kind != NONE}


def _matches_nothing(pattern: str, paths: list[str]) -> PlanError:
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(paths)), n=3, cutoff=0.3) or paths[:3]
    return PlanError(
        f"recompute: `{pattern}` matches no block",
        where=f"recompute.{pattern}",
        fix=f"use a glob over the names of blocks, such as {', '.join(near)}",
    )
