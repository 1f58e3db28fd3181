"""Import the user's code by a reference: ``package.module:NAME``, or ``path/file.py:NAME``.

The directory of a file is put first on the import path, so that the file can import its neighbours.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.shadow import OUR_PACKAGES
from passes.errors import PlanError, Where, first_line
from planner.files.text import is_file, shorten

FUNCTION_FORMS = "path/file.py:function or package.module:function"

_executed: dict[Path, tuple[bytes, ModuleType]] = {}  # file → its content when it ran, and its module


@dataclass(frozen=True, slots=True)
class NamedCode:
    """A reference to the user's code. ``label``: its place, MODEL or a key of the spec. ``forms``: its valid forms."""

    text: str
    label: str
    forms: str = FUNCTION_FORMS

    @property
    def parts(self) -> tuple[str, str]:
        """Module or file, and the name in it. Raises PlanError for another form."""
        name, colon, attribute = self.text.rpartition(":")
        if not colon or not name or not attribute:
            what = f"{self.label} {shorten(self.text)!r} has an unknown form"
            raise PlanError(what, where=self._key, fix=f"write {self.forms}")
        return name, attribute

    def load(self) -> Any:
        """Return the object. A file that this process has run already, and that is unchanged, does not run again.

        Raises PlanError, with the user's line, if the import fails or the name does not exist.
        """
        name, attribute = self.parts
        kept = _kept_module(Path(name)) if name.endswith(".py") else None
        return self.found(kept or self.module(name, is_alone=True), attribute)

    def function(self, *counts: int) -> tuple[Callable[..., Any], int]:
        """Return the function, and the first of ``counts`` of arguments that fits it; the last if it has no signature.

        Raises PlanError if the object is not callable, or takes another number of arguments.
        """
        found, numbers = self.load(), " or ".join(map(str, counts))
        if not callable(found):
            what = f"{self.label} {shorten(self.text)} is a {type(found).__name__}, not a function"
            raise PlanError(what, where=self._key, fix=f"name a function of {numbers} arguments")
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):
            return found, counts[-1]
        for count in counts:
            with suppress(TypeError):
                signature.bind(*range(count))
                return found, count
        code = getattr(found, "__code__", None)
        place = None if code is None else Where(file=code.co_filename, line=code.co_firstlineno)
        what = f"{self.label} {shorten(self.text)} takes {shorten(signature)}, and gets {numbers} arguments"
        raise PlanError(what, where=place or self._key, fix=f"give it {numbers} parameters")

    def module(self, name: str, *, is_alone: bool = False) -> ModuleType:
        """Import the module ``name``, or run the file ``name``. ``is_alone``: register the file in ``sys.modules``
        under a name of its own, even if another file has this stem. Raises PlanError if the code fails."""
        return self._file(Path(name), is_alone) if name.endswith(".py") else self._module(name)

    def found(self, source: ModuleType, attribute: str) -> Any:
        """Return the object in its module. Raises PlanError if the name does not exist."""
        value: Any = source
        for part in attribute.split("."):
            try:
                value = getattr(value, part)
            except AttributeError:
                known = [name for name in vars(source) if not name.startswith("_") and callable(getattr(source, name))]
                raise PlanError(
                    f"{self.label} {shorten(self.text)!r}: no {shorten(attribute)!r} in {source.__name__}",
                    where=Where(file=source.__file__ or ""),
                    fix=f"name one of its callables: {', '.join(known[:12]) or 'none is defined'}",
                ) from None
        return value

    @property
    def _key(self) -> str | None:
        return None if self.label == "MODEL" else self.label

    def _module(self, name: str) -> ModuleType:
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        try:
            return importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's code: it may derive from any class
            raise self._import_error(f"module {shorten(name)!r}", error, Path.cwd()) from error

    def _file(self, path: Path, is_alone: bool) -> ModuleType:
        if not is_file(path):
            raise PlanError(f"no file {shorten(path)}", where=self.label, fix=f"write {self.forms}")
        directory = path.resolve().parent
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
        name = _free_name(path) if is_alone else path.stem
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        assert spec is not None, path
        source = importlib.util.module_from_spec(spec)
        if is_alone:
            sys.modules[name] = source
        sys.modules.setdefault(name, source)
        content = path.read_bytes()
        try:
            # not by the loader, which would reuse compiled code of an earlier file with the same size and second
            exec(compile(content, str(path.resolve()), "exec", dont_inherit=True), vars(source))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's code: it may derive from any class
            sys.modules.pop(name, None)
            raise self._import_error(f"file {path}", error, directory) from error
        _executed[path.resolve()] = content, source
        return source

    def _import_error(self, what: str, error: BaseException, directory: Path) -> PlanError:
        missing = getattr(error, "name", None) or ""
        package = missing.partition(".")[0]
        if isinstance(error, ImportError) and package in OUR_PACKAGES and (directory / package).exists():
            return PlanError(
                f"{what} imports its own {package!r}, but meshwright's package of this name is loaded instead",
                where=Where(file=str(directory / package)),
                fix=f"rename the directory {package!r}, or import it through a parent package",
            )
        return PlanError(
            f"{what} cannot be imported: {first_line(error)}",
            where=line_of(error) or self._key,
            fix=f"check the name and the import path; {self.label} is {self.forms}",
        )


def is_named(text: Any) -> bool:
    """Return whether a value of the spec is a reference to code: two parts around a colon."""
    return isinstance(text, str) and all(text.rpartition(":"))


def from_directory(text: str, directory: Path | None) -> str:
    """Return the reference with its file taken relative to ``directory``, if the file exists there; else unchanged."""
    name, _, attribute = text.rpartition(":")
    if directory is None or not name.endswith(".py") or Path(name).is_absolute():
        return text
    return f"{directory / name}:{attribute}" if is_file(directory / name) else text


def line_of(error: BaseException) -> Where | None:
    """Return the line of user code that raised ``error``: the deepest outside of installed packages and meshwright."""
    if isinstance(error, SyntaxError):
        return Where(file=error.filename or "", line=error.lineno or 0, code=(error.text or "").strip())
    frames = traceback.extract_tb(error.__traceback__)
    ours = tuple(str(Path(__file__).resolve().parents[2] / package) + "/" for package in OUR_PACKAGES)
    outside = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(("<", *ours))]
    user = [f for f in outside if not f.filename.startswith(sys.base_prefix)]
    if not user:
        return None
    return Where(file=user[-1].filename, line=user[-1].lineno or 0, code=user[-1].line or "")


def _kept_module(path: Path) -> ModuleType | None:
    """Return the module of a file that has not changed since this process ran it, else None."""
    content, source = _executed.get(path.resolve(), (None, None))
    return source if source is not None and is_file(path) and path.read_bytes() == content else None


def _free_name(path: Path) -> str:
    """Return the stem of ``path``, with a number if the module of another file has this name."""
    name, number = path.stem, 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path.resolve()):
        number += 1
        name = f"{path.stem}_{number}"
    return name
