"""Attributes of PyTorch are replaced by one list of interceptors, and come back whatever happens."""

import ast
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from passes.interceptors import by_identity, hiding, installed
from tests.tools.paths import ROOT

FILES = sorted((ROOT / "planner" / "capture").rglob("*.py"))
pytestmark = pytest.mark.check


def root_of(node: ast.expr) -> str:
    """The name that an attribute of an attribute begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def of_torch(tree: ast.Module) -> set[str]:
    """Names of a file that are imported from torch, or by ``import_module("torch…")``."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {a.asname or a.name for a in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and "import_module('torch" in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def assigned(source: str) -> Iterator[str]:
    """Assignments to attributes of what is torch's, as text."""
    tree = ast.parse(source)
    names = of_torch(tree)
    for node in ast.walk(tree):
        targets = [
            t for t in ast.walk(node) if isinstance(t, ast.Attribute) and isinstance(t.ctx, (ast.Store, ast.Del))
        ]
        if isinstance(node, ast.stmt) and any(root_of(t) in names for t in targets):
            yield ast.unparse(node).splitlines()[0]
        is_set = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
        if is_set and root_of(node.args[0]) in names:
            yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_file_of_capture_assigns_to_an_attribute_of_torch(file: Path):
    assert list(assigned(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch import nn\nnn.Module._apply = print",
        "from torch.fx.proxy import TracerBase as T\nsetattr(T, 'create_node', print)",
        "import torch.overrides\ntorch.overrides.f, x = 1, 2",
        "frame = import_module('torch._dynamo.eval_frame')\nframe.OptimizedModule.__call__ = print",
        "from torch import Tensor\ndel Tensor.data",
    ],
)
def test_such_an_assignment_is_found(line: str):
    assert list(assigned(line))


def test_interceptors_of_one_attribute_are_left_in_reverse():
    before = nn.Module._apply
    with installed((nn.Module, "_apply", 1), (nn.Module, "_apply", 2)):
        assert nn.Module._apply == 2
    assert nn.Module._apply is before


def test_an_inherited_attribute_is_inherited_again():
    with installed((nn.Linear, "_apply", 1)):
        assert nn.Linear._apply == 1
    assert "_apply" not in vars(nn.Linear)


class Stubborn:
    value = 1

    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            if value == 1:
                raise RuntimeError("it does not go back")
            super().__setattr__(name, value)


def test_the_others_are_left_even_if_one_raises():
    kept = Stubborn.Meta("Kept", (), {"value": 1})
    before = torch.Tensor.detach
    with suppress(RuntimeError), installed((torch.Tensor, "detach", 0), (kept, "value", 2)):
        assert kept.value == 2
    assert torch.Tensor.detach is before


def test_names_of_an_object_are_replaced_in_modules_and_built_in_names_hidden():
    module = types.ModuleType("made")
    module.ask, module.isinstance = max, min  # pyright: ignore[reportAttributeAccessIssue]
    replaced = by_identity([module], {id(max): (max, 5)})
    with installed(*replaced, *hiding([module], {"isinstance": 6, "type": 7})):
        assert (module.ask, module.isinstance, module.type) == (5, min, 7)  # pyright: ignore[reportAttributeAccessIssue]
    assert (module.ask, hasattr(module, "type")) == (max, False)  # pyright: ignore[reportAttributeAccessIssue]
