"""Our classes of typer: bad input ends with one message, flags show no value, the help lists ``plan`` first."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EROFS
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from passes.errors import PlanError, RunError
from planner.files.text import OPEN_FILES_FIX, printable, reason, shorten

BAD_INPUT, RUN_FAILED = 2, 1
_OF_FILES = (EMFILE, ENFILE, ENOSPC, EFBIG, EDQUOT, EIO, EROFS, ENOENT)  # file errors even without a file name
PROCESS = "process"  # the context object when the command is all that this process does


class _PlainFlags:
    """Flags without the ``<bool>`` that typer prints behind them, as if a value had to follow."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Commands(_PlainFlags, TyperGroup):
    """A group of commands: an error ends with one message and an exit code, never with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _file_errors():
                return super().invoke(ctx)
        except (PlanError, RunError) as error:
            typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
            raise typer.Exit(BAD_INPUT if isinstance(error, PlanError) else RUN_FAILED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names with ``plan`` first: users begin with it."""
        return sorted(super().list_commands(ctx), key=lambda name: name != "plan")


@contextmanager
def _file_errors() -> Iterator[None]:
    """Turn an OSError about a file, such as a name that is too long, into a PlanError."""
    try:
        yield
    except OSError as error:
        too_many = error.errno in (EMFILE, ENFILE)
        if error.filename is None and error.errno not in _OF_FILES:
            raise
        fix = OPEN_FILES_FIX if too_many else "use another file or directory, or repair this one"
        raise PlanError(reason(error), where=shorten(error.filename or "this process"), fix=fix) from error


class Command(_PlainFlags, TyperCommand):
    """A command that reports an error of a function's argument at the option of this argument."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the place ``top_p`` of a PlanError becomes ``--top-p``."""
        try:
            return super().invoke(ctx)
        except PlanError as error:
            name = str(error.where).partition("[")[0]
            options = (p.opts[0] for p in self.params if p.name in (name, name.removesuffix("s")) and p.name)
            error.where = next((option for option in options if option.startswith("--")), error.where)
            raise


class App(typer.Typer):
    """A typer app with commands of the class ``Command``."""

    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": Command, **options})
