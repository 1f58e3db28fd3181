"""What an op does stands in its rule: sets of ops beside the table of rules are few, and become fewer."""

import ast
from collections.abc import Iterator

import pytest

from tests.tools.paths import ROOT

MOST = 45
BUILDERS = {"Ops", "ops_named", "packets"}  # of ops by name
TABLES = {"table", "Covers"}  # op → function, as text


def ops_in(value: ast.expr) -> set[str]:
    """Names of the aten ops in an expression: ``aten.mul.Tensor``, ``Ops("mul add")``."""
    found = set[str]()
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).removeprefix("torch.ops.") == "aten":
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BUILDERS:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found |= {name.partition(".")[0] for text in texts for name in text.split()}
    return found


def is_table_of_functions(value: ast.expr, functions: set[str]) -> bool:
    """Whether an expression maps ops to functions, as a table of rewrites does."""
    inner = list(ast.walk(value))
    called = {n.func.id for n in inner if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    values = [v for n in inner if isinstance(n, ast.Dict) for v in n.values]
    values += [n.args[1] for n in inner if isinstance(n, ast.Call) and ast.unparse(n.func) == "dict.fromkeys"]
    values = [v.elts[0] if isinstance(v, ast.Tuple) and v.elts else v for v in values]  # with facts behind it
    owners = [v.value if isinstance(v, ast.Attribute) else v for v in values]
    is_function = [isinstance(v, ast.Lambda) or (isinstance(v, ast.Name) and v.id in functions) for v in owners]
    return bool(called & TABLES) or any(is_function)


def sets_of_ops(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each assignment of a module to which two or more ops belong."""
    body = ast.parse(text).body
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    functions |= {a.asname or a.name for n in body if isinstance(n, ast.ImportFrom) for a in n.names} - {"aten"}
    for node in body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        if len(ops_in(node.value)) > 1 and not is_table_of_functions(node.value, functions):
            yield node.lineno, ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


@pytest.mark.check
def test_sets_of_ops_beside_the_rules_do_not_become_more():
    paths = [p for room in ("planner", "passes") for p in sorted((ROOT / room).rglob("*.py"))]
    rooms = [p for p in paths if ROOT / "passes" / "rules" not in p.parents]
    found = [f"{p.relative_to(ROOT)}:{line} {name}" for p in rooms for line, name in sets_of_ops(p.read_text())]
    assert len(found) <= MOST, f"{len(found)} sets of ops; ask the rule of the op instead:\n" + "\n".join(found)


@pytest.mark.check
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A = {aten.mul.Tensor, aten.add.Tensor}", ["A"]),
        ("A: set[Any] = {torch.ops.aten.mul, torch.ops.aten.add}", ["A"]),
        ('A = B | Ops("mul add")', ["A"]),
        ('A = frozenset(ops_named("mul.Tensor add"))', ["A"]),
        ("A = dict.fromkeys((aten.mul, aten.add), 1)", ["A"]),
        ("A = {aten.max.dim: aten.amax.default}", ["A"]),
        ("def f(): ...\nA = {aten.mul: f, aten.add: f}", []),
        ("A = {aten.mul: lambda x: x, aten.add: lambda x: x}", []),
        ('A = (Covers(f, "mul add"), Covers(g, "sub"))', []),
        ("A = {aten.mul.Tensor, aten.mul.Scalar}", []),
        ("A = B | C", []),
        ("def f(): return x in (aten.mul, aten.add)", []),
    ],
)
def test_a_set_of_ops_is_seen(text: str, names: list[str]):
    assert [name for _, name in sets_of_ops(text)] == names
