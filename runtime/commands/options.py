"""Options of a command as fields of dataclasses: each is written once, and the command gets one object of a group.

@takes(Saving)
def train_command(model: Model, saving: Saving) -> None: ...        meshwright train MODEL --save DIR --keep 3
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

Load = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Load weights from a save of `train`, or a directory of saves, of any layout."),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="FILE", help="A tokenizer.json for the text; default: bytes are the tokens.")
]
NumRanks = Annotated[int | None, typer.Option(help="Number of local processes; default: the size of the mesh.")]


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The last parameters of the command, one for each of ``groups``, come from the fields of these as options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        arguments, taken = own[: -len(groups)], [parameter.name for parameter in own[-len(groups) :]]

        @wraps(command)
        def call(**given: Any) -> None:
            made = {
                name: group(**{f.name: given.pop(f.name) for f in fields(group) if f.name in given})
                for name, group in zip(taken, groups, strict=True)
            }
            command(**given, **made)

        parameters = [*arguments, *(option for group in groups for option in _options(group))]
        required_first = sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)
        call.__signature__ = inspect.Signature(required_first)  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in required_first}
        del call.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]  # its hints would be read in place of ours
        return call

    return decorate


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(
            f.name,
            kind,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]
