"""Command-line options as fields of dataclasses: each is described once, and the command receives one object per group.

@dataclass(frozen=True, kw_only=True)
class Saving:
    save: str | None = option("Directory for saves of the training state.", "DIR")
    keep: int = option("Keep only the K newest saves.", "K", default=3, min=1)
    quiet: bool = flag("Print no line per step.", "-q")

@takes(Saving)
def train_command(model: Model, saving: Saving) -> None: ...        meshwright train MODEL --save DIR --keep 4 -q
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

Load = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Load the weights of this save, or of the last save in a directory; any layout."),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="FILE", help="A tokenizer.json for the text; default: bytes are the tokens.")
]
NumRanks = Annotated[int | None, typer.Option(help="Number of local processes; default: the size of the mesh.")]


def option(
    help: str, metavar: str | None = None, *names: str, default: Any = None, mark: str = "", **limits: Any
) -> Any:
    """Return a field that becomes an option, required if ``default`` is MISSING. ``names``: spellings instead of
    ``--name``; ``mark``: a note for code that reads the fields; ``limits``: of the value, in typer's names."""
    described = typer.Option(*names, metavar=metavar, help=help, **limits)
    return field(default=default, metadata={"option": described, "mark": mark})


def flag(help: str, *names: str, mark: str = "") -> Any:
    """Return a field that becomes an option without a value, False by default. ``names``: further spellings."""
    return field(default=False, metadata={"flag": (help, names), "mark": mark})


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes one object of each of ``groups`` last: their fields become its options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        arguments, taken = own[: -len(groups)], [parameter.name for parameter in own[-len(groups) :]]

        @wraps(command)
        def call(**values: Any) -> None:
            objects = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group) if f.name in values})
                for name, group in zip(taken, groups, strict=True)
            }
            command(**values, **objects)

        parameters = [*arguments, *(option for group in groups for option in _options(group))]
        required_first = sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)
        call.__signature__ = inspect.Signature(required_first)  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in required_first}
        del call.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]  # else typer reads the hints of the command
        return call

    return decorate


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return [
        inspect.Parameter(
            f.name, kind, default=none if f.default is MISSING else f.default, annotation=_annotated(hints[f.name], f)
        )
        for f in fields(group)
    ]


def _annotated(hint: Any, f: Field[Any]) -> Any:
    described = f.metadata.get("option")
    if "flag" in f.metadata:
        help, more = f.metadata["flag"]
        described = typer.Option(f"--{f.name.replace('_', '-')}", *more, help=help)
    return hint if described is None else Annotated[hint, described]
