"""No test has a limit of its own for what hangs: all of them know one number, and pytest's own limit is longer."""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

PYTEST_SECONDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["timeout"]
LIMITS = {"timeout", "timeout_seconds"}
WAITS = {"wait", "join", "result", "timeout"}
MAY_HAVE_ONE = re.compile(r"timeout\w*( *: *\w+)? *[=(] *\d|timedelta\(|monotonic\(\) \+|\.(wait|join|result)\(\d")


def limits(source: str) -> Iterator[tuple[int, float]]:
    """The line and the seconds of each limit that is written as a number, and below that of a test."""
    for node in ast.walk(ast.parse(source)) if MAY_HAVE_ONE.search(source) else ():
        for value in _limits_at(node):
            is_number = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
            if is_number and value.value < PYTEST_SECONDS:
                yield value.lineno, float(value.value)


def _limits_at(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        yield from (k.value for k in node.keywords if k.arg in LIMITS or (k.arg, name) == ("seconds", "timedelta"))
        if isinstance(node.func, ast.Attribute) and name in WAITS:
            yield from node.args
    elif (
        isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and ast.unparse(node.left) == "time.monotonic()"
    ):
        yield node.right
    elif isinstance(node, ast.arguments):
        named = zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True)
        both = (*named, *zip(node.kwonlyargs, node.kw_defaults, strict=True))
        yield from (value for argument, value in both if argument.arg in LIMITS and value is not None)


@pytest.mark.parametrize(
    "line",
    [
        "launch(train, 2, timeout_seconds=60)",
        "subprocess.run(command, timeout=60)",
        "thread.join(60)",
        "meet(store, timedelta(seconds=60))",
        "deadline = time.monotonic() + 60",
        "def run(a, timeout_seconds=60): ...",
        "def run(a, *, timeout=60): ...",
        "@pytest.mark.timeout(60)\ndef test_a(): ...",
    ],
)
def test_each_way_to_write_a_limit_is_seen(line):
    assert list(limits(line)) == [(1, 60.0)]


def test_what_hangs_has_one_limit_everywhere():
    files = {str(f.relative_to(ROOT)): f.read_text() for f in (ROOT / "tests").rglob("*.py")}
    found = {name: list(limits(text)) for name, text in files.items() if not name.endswith("test_limits.py")}
    assert len(found) > 400
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_pytest_ends_a_test_after_what_hangs_in_it_has_been_named():
    assert PYTEST_SECONDS >= 3 * HANG_SECONDS
