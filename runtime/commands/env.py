"""The command ``meshwright env``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from planner.cli import Format, Output, write_text

EPILOG = "Example: meshwright env --format json > env.json"


def env_command(
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
) -> None:
    """Print versions, devices, compilers and settings for a bug report, without host names and paths."""
    from runtime.environment import environment

    parts = environment()
    if format is Format.json:
        write_text(json.dumps({part.title: dict(part.lines) for part in parts}, indent=2), output)
        return
    width = max(len(name) for part in parts for name, _ in part.lines) + 2
    blocks = ("\n".join([part.title, *(f"  {name:<{width}}{how}" for name, how in part.lines)]) for part in parts)
    write_text("\n\n".join(blocks), output)
