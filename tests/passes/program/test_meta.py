"""What nodes carry is listed in one place, and written by capture and placement alone."""

import ast
from collections.abc import Iterator

import pytest

from passes.program.program import META, STAGE_META
from tests.tools.paths import ROOT

HOUSES = [path for house in ("planner", "passes", "runtime") for path in sorted((ROOT / house).rglob("*.py"))]


def is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def keys(tree: ast.AST) -> Iterator[str]:
    """The literal keys by which ``.meta`` is read or written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_meta(node.value) and isinstance(node.slice, ast.Constant):
            yield node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
        elif isinstance(node, ast.Compare) and is_meta(node.comparators[0]) and isinstance(node.left, ast.Constant):
            yield node.left.value  # pyright: ignore[reportReturnType]
        elif (
            isinstance(node, ast.Assign) and any(is_meta(t) for t in node.targets) and isinstance(node.value, ast.Dict)
        ):
            yield from (k.value for k in node.value.keys if isinstance(k, ast.Constant))  # pyright: ignore


def writes(tree: ast.AST) -> Iterator[int]:
    """Lines that write ``.meta`` or a key of it."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else ()
        flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if any(is_meta(t) or (isinstance(t, ast.Subscript) and is_meta(t.value)) for t in flat):
            yield node.lineno  # pyright: ignore[reportAttributeAccessIssue]
        changes = ("update", "pop", "setdefault", "clear")
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr in changes and is_meta(node.func.value):  # pyright: ignore
            yield node.lineno  # pyright: ignore[reportAttributeAccessIssue]


STAGES_ARE_READ = (
    "passes",
    "runtime",
    "planner/trace",
    "planner/compiled",
    "planner/cost/whole.py",
    "planner/one_position.py",
    "planner/tables/build.py",
    "planner/tables/parameters.py",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("house", ["planner", "passes", "runtime"])
def test_every_key_is_listed(house: str):
    """Those of lowered stages stand in the rooms alone that read them."""
    found = {(p, k) for p in HOUSES if p.is_relative_to(ROOT / house) for k in keys(ast.parse(p.read_text()))}
    lowered = {(p, k) for p, k in found if any(p.is_relative_to(ROOT / room) for room in STAGES_ARE_READ)}
    unlisted = {(str(p), k) for p, k in found if k not in META and not ((p, k) in lowered and k in STAGE_META)}
    assert unlisted == set()


def test_every_listed_key_is_used():
    assert {k for path in HOUSES for k in keys(ast.parse(path.read_text()))} >= set(STAGE_META) | set(META)


def test_only_passes_capture_and_placement_write_a_captured_graph():
    """Draws where they are named, a cut over cp. Lowering writes its own copies of it, the graphs of stages."""
    rooms = ("capture", "placement", "files")
    allowed = [ROOT / "passes", *(ROOT / "planner" / room for room in rooms)]
    others = [path for path in HOUSES if not any(path.is_relative_to(room) for room in allowed)]
    assert [(str(p), line) for p in others for line in writes(ast.parse(p.read_text()))] == []


def test_a_write_is_seen():
    lines = ["node.meta['a'] = 1", "a.meta['x'], b.meta['y'] = 1, 2", "node.meta = {}", "node.meta.update(x)"]
    assert [len(list(writes(ast.parse(line)))) for line in lines] == [1, 1, 1, 1]
    assert list(writes(ast.parse("x = node.meta['a']; y = node.meta.get('b')"))) == []
