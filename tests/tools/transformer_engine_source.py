"""The real source of make_graphed_callables of Transformer Engine: where it is found, and what it checks.

It is read, never kept: of an installed package (which is not imported), of a folder or a wheel that an environment
variable names, or of a wheel that pip fetches into a temporary folder.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "MESHWRIGHT_TRANSFORMER_ENGINE"
FETCH_SECONDS = 60
INSIDE = "transformer_engine/pytorch"


class Source(NamedTuple):
    """The text of two files: ``graph`` captures, ``distributed`` holds the generators that it registers."""

    graph: str
    distributed: str


class NotThere(Exception):
    """Why there is no source."""


def local_source() -> Source | None:
    """From the variable or an installed package."""
    given = os.environ.get(VARIABLE)
    if given:
        return read(Path(given))
    spec = importlib.util.find_spec("transformer_engine")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder).parent / INSIDE / "graph.py").exists():
            return read(Path(folder).parent)
    return None


def fetched_source(folder: Path, version: str = "") -> Source:
    """From a wheel that pip fetches, the newest unless a version is given. Raises NotThere with its reason."""
    wanted = f"transformer-engine=={version}" if version else "transformer-engine"
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries", "0", "--timeout", "10"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotThere(f"pip fetched no wheel of {wanted} in {FETCH_SECONDS} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise NotThere(f"pip fetched no wheel: {ran.stderr.strip()[-300:]}")
    return read(wheels[-1])


def read(path: Path) -> Source:
    """Of a wheel, or of the folder that the package lies in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return Source(*(wheel.read(f"{INSIDE}/{name}.py").decode() for name in Source._fields))
    return Source(*((path / INSIDE / f"{name}.py").read_text() for name in Source._fields))


def function(source: str, name: str) -> ast.FunctionDef:
    (found,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


def parameters(source: str, name: str = "make_graphed_callables") -> dict[str, tuple[str, str | None]]:
    """Name → (kind, default as it is written)."""
    given = function(source, name).args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(map(ast.unparse, given.defaults))
    named = [None if d is None else ast.unparse(d) for d in given.kw_defaults]
    return {a.arg: ("positional", d) for a, d in zip(positional, defaults, strict=True)} | {
        a.arg: ("named", d) for a, d in zip(given.kwonlyargs, named, strict=True)
    }


def checks(source: str, name: str = "_make_graphed_callables") -> set[str]:
    """The conditions under which a function refuses its arguments, each as the sorted names that it compares.

    An assertion, or an ``if`` that only raises. Those of functions inside run later, and are not looked at.
    """
    return {" ".join(sorted(_names(test))) for test in _refusals(function(source, name).body)}


def _refusals(body: list[ast.stmt]) -> Iterator[ast.expr]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        only_raises = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise)
        if isinstance(statement, ast.Assert) or only_raises:
            yield statement.test
        for inner in ("body", "orelse"):
            yield from _refusals(getattr(statement, inner, []))


def _names(test: ast.expr) -> set[str]:
    found = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)
    }
    return found - {"all", "len", "isinstance", "torch", "tuple", "list", "int", "bool", "set", "type", "any"}
