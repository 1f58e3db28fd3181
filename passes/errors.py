"""One clear error for the user: the problem, its place in THEIR code or spec, and the fix.

PlanError: column-parallel linear: weight [33, 8], dim 0 = 33 is not divisible by tp = 2
  at:  blocks.0.mlp.up   (mlp.py:7, `return self.down(act(self.up(x)))`)
  fix: choose tp from {1, 3, 11, 33}, or set tensor_parallel.overrides: {"blocks.*.mlp.up": replicate}
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import PurePath
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's code or spec; every part may be missing."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        source = f"{PurePath(self.file).name}:{self.line}" if self.line else PurePath(self.file).name
        if self.code:
            source = f"{source}, `{self.code}`"
        if self.module and source:
            return f"{self.module}   ({source})"
        return self.module or source


class PlanError(ValueError):
    """Bad input of a user: ``what`` is the problem, ``where`` its place, ``fix`` the remedy. The command line exits
    with 2.
    """

    def __init__(self, what: str, *, where: Where | str | None = None, fix: str) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all fields: an exception is made again of its positional arguments alone."""
        return partial(type(self), fix=self.fix), (self.what,), self.__dict__

    @property
    def words(self) -> tuple[str, str, str]:
        """The problem, its place and the remedy as texts, for another process."""
        return self.what, str(self.where or ""), self.fix

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Self:
        what, where, fix = words
        return cls(what, where=where, fix=fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where and str(self.where):
            lines.append(f"  at:  {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class RunError(RuntimeError):
    """A run failed for another reason than bad input. The command line shows the message alone and exits with 1."""


def require(ok: bool, what: str) -> None:
    """Raise a PlanError unless ``ok``: a row that contradicts itself, mostly from a file that was changed by hand."""
    if not ok:
        raise PlanError(f"the plan contradicts itself: {what}", fix="plan the model again from the spec")


def first_line(error: BaseException) -> str:
    """Return an error of other code in one line: its kind and the first line of its message."""
    text = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:1000]}" if text else type(error).__name__


@contextmanager
def refusing(
    what: str,
    *,
    where: Where | str | Callable[[BaseException], Where | str | None] | None,
    fix: str,
    of: tuple[type[BaseException], ...] = (BaseException,),
) -> Iterator[None]:
    """Inside, errors ``of`` these kinds, those of a user's or another package's code (it may derive from any class),
    are PlanErrors: ``what``, and the error's first line; ``where`` may depend on the error.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except of as error:
        place = where(error) if callable(where) else where
        raise PlanError(f"{what}: {first_line(error)}", where=place, fix=fix) from error


def imported(name: str, what: str, *, where: str, fix: str) -> Any:
    """Return the module ``name``. Raises PlanError if its package, which ``what`` needs, is missing or broken."""
    needs = f"{what} needs the package {name.partition('.')[0]}"
    with refusing(needs, where=where, fix=fix, of=(ImportError, OSError)):
        return import_module(name)


def message_of(error: BaseException) -> str:
    """Return the text of an error; empty if its own ``__str__`` fails."""
    try:
        return str(error)
    except Exception:
        return ""


_MOST_SHOWN = 20  # errors of one spec


class SpecError(PlanError):
    """Bad input in the spec: ``where`` names its file and line. ``errors``: all of them if there are several."""

    errors: tuple[PlanError, ...] = ()

    @classmethod
    def of(cls, errors: Sequence[PlanError], what: str = "the spec") -> PlanError:
        """Return one error that shows all, each once and in the order of their lines; a single one unchanged.

        ``what``: the file that has them, for the text.
        """
        first, *rest = sorted({str(e): e for e in errors}.values(), key=lambda e: getattr(e.where, "line", 0))
        if not rest:
            return first
        together = cls(f"{1 + len(rest)} errors in {what}", where=first.where, fix=first.fix)
        together.errors = (first, *rest)
        return together

    def __str__(self) -> str:
        if not self.errors:
            return super().__str__()
        more = len(self.errors) - _MOST_SHOWN
        return "\n".join([self.what, *map(str, self.errors[:_MOST_SHOWN]), *[f"and {more} more"] * (more > 0)])
