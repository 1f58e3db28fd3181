"""The command ``meshwright env``."""

import json
from typing import Annotated

import typer

from planner.commands.cli import Format, Output, write_text

EPILOG = "Example: meshwright env --format json > env.json"


def env_command(
    format: Annotated[Format, typer.Option(help="Output format.")] = "table",
    output: Output = None,
) -> None:
    """Print versions, devices, compilers and settings for a bug report, without host names and paths."""
    from runtime.environment import environment

    parts = environment()
    if format == "json":
        write_text(json.dumps(parts, indent=2), output)
        return
    width = max(len(name) for lines in parts.values() for name in lines) + 2
    blocks = ("\n".join([t, *(f"  {n:<{width}}{how}" for n, how in lines.items())]) for t, lines in parts.items())
    write_text("\n\n".join(blocks), output)
