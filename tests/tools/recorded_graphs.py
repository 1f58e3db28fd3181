"""Graphs of the CPU that behave as CUDA graphs: every op of a capture is recorded, and run again in the same memory.

    capture    the ops run once, with what they read and wrote
    replay     each op runs again on the tensors it had, and its results are written where the first ones lie
    released   memory that its owner no longer holds: NaN as soon as a graph that was captured later is replayed

With them the real ``make_graphed_callables`` of Transformer Engine runs on a CPU, from its source alone.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.ops import collectives

PACKAGE = "transformer_engine.pytorch"


class Pool:
    """What graphs of one call share. Owns: how many were captured, and the memory that was let go, with the count."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.made: set[int] = set()
        self.released: list[tuple[int, Tensor]] = []
        self.num_poisoned = 0

    def release(self, given: Any) -> Any:
        """In place of a weak reference."""
        for value in tree_leaves(given):
            if isinstance(value, Tensor) and value.is_floating_point() and _at(value) in self.made:
                self.released.append((self.num_captured, value))
        return given

    def poison(self, captured: int) -> None:
        for count, value in self.released:
            if captured >= count:
                value.data.fill_(float("nan"))
                self.num_poisoned += 1


class RecordedGraph(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph. Owns: its ops."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool, self.number = pool, -1
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _run(func, args, kwargs or {})
        given = {_at(v) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        results = [v for v in tree_leaves(made) if isinstance(v, Tensor)]
        self.pool.made |= {_at(v) for v in results} - given
        self.ops.append((func, args, kwargs or {}, results))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        self.pool.poison(self.number)
        for func, args, kwargs, results in self.ops:
            made = [v for v in tree_leaves(_run(func, args, kwargs)) if isinstance(v, Tensor)]
            for old, new in zip(results, made, strict=True):
                if _at(old) != _at(new):
                    old.data.copy_(new)

    def reset(self) -> None:
        self.ops = []


@contextmanager
def capture(graph: RecordedGraph, pool: Any = None) -> Iterator[None]:
    graph.number = graph.pool.num_captured
    graph.pool.num_captured += 1
    with graph:
        yield


@contextmanager
def on_a_cpu(source: str, folder: Path) -> Iterator[Pool]:
    """``transformer_engine.pytorch`` has the function of this source, and torch.cuda has graphs of the CPU."""
    pool = Pool()
    path = folder / "graph.py"
    path.write_text(source)
    cuda: dict[str, Any] = {
        "CUDAGraph": type("CUDAGraph", (RecordedGraph,), {"__init__": lambda self: RecordedGraph.__init__(self, pool)}),
        "graph": capture,
        "synchronize": lambda: None,
        "stream": lambda stream: nullcontext(),
        "Stream": object,
        "current_stream": lambda: "the stream",
        "get_rng_state": lambda: None,
        "set_rng_state": lambda state: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "reduce_scatter_single", _reduce_scatter)
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        for name, names in imported(source).items():
            patch.setitem(sys.modules, name, _module(name, names, pool))
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.graph", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module._graph_pool_handle = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules[PACKAGE].make_graphed_callables = module.make_graphed_callables  # pyright: ignore
        yield pool


def imported(source: str) -> dict[str, list[str]]:
    """Modules of the package that the file imports from → the names; with every package above them."""
    found: dict[str, list[str]] = {"transformer_engine": [], PACKAGE: []}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("transformer_engine")):
            name = f"{PACKAGE}.{node.module}" if node.level else str(node.module)
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:end]), [])
            found[name] += [alias.name for alias in node.names]
    return found


def _module(name: str, names: list[str], pool: Pool) -> ModuleType:
    """Classes of nothing, but for the few names that run without FP8."""
    module = ModuleType(name)
    module.__path__ = []
    known = {
        "autocast": lambda **_: nullcontext(),
        "FP8GlobalStateManager": _NoFP8,
        "get_all_rng_states": dict,
        "graph_safe_rng_available": lambda: False,
        "make_weak_ref": pool.release,
    }
    for each in names:
        setattr(module, each, known.get(each) or type(each, (), {}))
    return module


class _NoFP8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_first_fp8_module() -> bool:
        return False


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective has ended when it returns."""
    made = func(*args, **kwargs)
    for value in tree_leaves(made):
        if func.namespace == "c10d" and hasattr(value, "wait"):
            value.wait()
    return made


def _reduce_scatter(own: Tensor, whole: Tensor, *, group: Any) -> None:
    """gloo ends its own by ops on memory that it keeps to itself, which a replay would run again."""
    summed = whole.clone()
    dist.all_reduce(summed, group=group)
    own.copy_(summed.view(dist.get_world_size(group), -1)[dist.get_rank(group)])


def _at(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
