"""The command ``meshwright cache``: directory, number and size of cached captures, and their removal."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from passes.errors import PlanError
from planner.cli import CACHE, Format, Output, write_text

EPILOG = "Examples: meshwright cache · meshwright cache --clear"


def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all cached captures.")] = False,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
) -> None:
    """Print the directory, the number and the size of cached captures, or remove them."""
    from planner.capture.kept.store import kept_in, place_of

    place = place_of()
    if place is None:
        raise PlanError(
            f"{CACHE}=0: the cache of captures is off", where=CACHE, fix=f"unset {CACHE}, or set it to a directory"
        )
    try:
        found = kept_in(place)
        num_bytes = sum(path.stat().st_size for path in found)
        for path in found if clear else ():
            path.unlink(missing_ok=True)
    except OSError as error:
        raise PlanError(
            f"cannot use {error.filename}: {error.strerror}",
            where=CACHE,
            fix=f"set {CACHE} to a directory that you can write to",
        ) from error
    if format is Format.json:
        text = json.dumps({"place": str(place), "captures": len(found), "bytes": num_bytes, "removed": clear})
    else:
        text = f"{place}: {len(found)} captures, {num_bytes / 2**20:.1f} MiB{', removed' if clear else ''}"
    write_text(text, output)
