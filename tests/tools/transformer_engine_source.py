"""The real source of make_graphed_callables of Transformer Engine: where it is found, and what it checks.

It is read, never kept: the file of an installed package (which is not imported), a path in an environment variable
(graph.py, a folder, or a wheel), or a wheel that pip fetches into a temporary folder.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "MESHWRIGHT_TRANSFORMER_ENGINE"
INSIDE = "transformer_engine/pytorch/graph.py"


class NotThere(Exception):
    """Why there is no source."""


def local_source() -> str | None:
    """From the variable or an installed package."""
    given = os.environ.get(VARIABLE)
    if given:
        return read(Path(given))
    spec = importlib.util.find_spec("transformer_engine")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).parent / INSIDE
        if path.exists():
            return path.read_text()
    return None


def fetched_source(folder: Path, version: str = "") -> str:
    """From a wheel that pip fetches, the newest unless a version is given. Raises NotThere with its reason."""
    wanted = f"transformer-engine=={version}" if version else "transformer-engine"
    command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted]
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise NotThere(f"pip fetched no wheel: {ran.stderr.strip()[-300:]}")
    return read(wheels[-1])


def read(path: Path) -> str:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(INSIDE).decode()
    return (path / INSIDE if path.is_dir() else path).read_text()


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
