"""How typer runs our commands: bad input is one message, flags take no value, ``plan`` stands first in the help."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOENT, ENOSPC, EROFS
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from passes.errors import PlanError, RunError
from planner.files.text import OPEN_FILES_FIX, printable, reason, shorten

BAD_INPUT, RUN_FAILED = 2, 1
_OF_FILES = (EMFILE, ENFILE, ENOSPC, EFBIG, EDQUOT, EIO, EROFS, ENOENT)  # of the machine, whichever file it was
PROCESS = "process"  # the object of a context: the command is all that this process does


class _PlainFlags:
    """Typer writes ``<bool>`` behind a flag, as if a value had to follow it."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Commands(_PlainFlags, TyperGroup):
    """A group of commands in which bad input ends with one message and exit code 2, never with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _file_errors():
                return super().invoke(ctx)
        except (PlanError, RunError) as error:
            typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
            raise typer.Exit(BAD_INPUT if isinstance(error, PlanError) else RUN_FAILED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        """``plan`` first: all begins with it."""
        return sorted(super().list_commands(ctx), key=lambda name: name != "plan")


@contextmanager
def _file_errors() -> Iterator[None]:
    """A file that the system refuses, wherever it is opened or looked up, such as one with too long a name."""
    try:
        yield
    except OSError as error:
        too_many = error.errno in (EMFILE, ENFILE)
        if error.filename is None and error.errno not in _OF_FILES:
            raise
        fix = OPEN_FILES_FIX if too_many else "use another file or directory, or repair this one"
        raise PlanError(reason(error), where=shorten(error.filename or "this process"), fix=fix) from error


class Command(_PlainFlags, TyperCommand):
    """A command with a help text that shows flags as flags."""

    def invoke(self, ctx: Any) -> Any:
        """An error at an argument of a function is one at the option that gave it: ``top_p`` → ``--top-p``."""
        try:
            return super().invoke(ctx)
        except PlanError as error:
            name = str(error.where).partition("[")[0]
            options = (p.opts[0] for p in self.params if p.name in (name, name.removesuffix("s")) and p.name)
            error.where = next((option for option in options if option.startswith("--")), error.where)
            raise


class App(typer.Typer):
    """All its commands are of the class ``Command``."""

    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": Command, **options})
