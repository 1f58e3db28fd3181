"""Names of torch.cuda and of Transformer Engine, so that the real make_graphed_callables runs from its source.

    torch.cuda.CUDAGraph, graph     runtime.cuda_graphs.recorded: ops at their addresses, blocks that are given again
    make_weak_ref                   the same memory, without holding its block
    its tracker of generators       its own source

What it does not need without FP8 are classes of nothing. On a GPU (``on_a_gpu``) torch.cuda is CUDA's own.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from passes.ops.random_state import RandomState
from planner.capture.model.exchange import storage_of
from runtime.cuda_graphs.recorded import Pool, RecordedGraph
from tests.tools.transformer_engine_source import Source

PACKAGE = "transformer_engine.pytorch"
TRACKER = {"_ALL_ACTIVE_RNG_STATES", "CudaRNGStatesTracker", "get_all_rng_states", "set_all_rng_states"}


@dataclass
class Device:
    """What stands in for a GPU. ``random``: who tells which generator is the default one."""

    random: RandomState = field(default_factory=lambda: RandomState(0, 0))
    pools: list[Pool] = field(default_factory=list)

    def pool(self) -> Pool:
        self.pools.append(Pool(torch.device("cpu")))
        return self.pools[-1]

    @contextmanager
    def capture(
        self, graph: Graph, pool: Pool, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        graph.recorded = RecordedGraph(pool, self.random, graph.generators)
        with graph.recorded.capturing():
            yield

    def weak(self, given: Any) -> Any:
        return tree_map(lambda v: self._weak(v) if isinstance(v, Tensor) and v.numel() else v, given)

    def _weak(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if all(pool.place_of(value) is None for pool in self.pools):
            return value
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        count = storage.nbytes() // value.element_size()
        alias = torch.frombuffer(memory, dtype=value.dtype, count=count)
        assert storage_of(alias) != storage_of(value)
        return alias.as_strided(value.shape, value.stride(), value.storage_offset())


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.recorded: RecordedGraph | None = None

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        assert self.recorded is not None, "a graph is replayed, but was not captured"
        self.recorded.replay()

    def reset(self) -> None:
        self.recorded = None


class Stream(nullcontext[None]):
    """Everything runs at once."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.device = device

    def wait_stream(self, stream: Stream) -> None: ...


@contextmanager
def cuda_graphs_of_a_cpu(random: RandomState | None = None) -> Iterator[Device]:
    """torch.cuda has graphs of the CPU."""
    device = Device() if random is None else Device(random)
    cuda: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": device.capture,
        "graph_pool_handle": device.pool,
        "synchronize": lambda: None,
        "stream": lambda stream: nullcontext(),
        "Stream": Stream,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "default_generators": (torch.default_generator,),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        yield device


@contextmanager
def on_a_cpu(source: Source, folder: Path) -> Iterator[Device]:
    """``transformer_engine.pytorch`` has the function of this source, and torch.cuda has graphs of the CPU."""
    with cuda_graphs_of_a_cpu() as device, from_source(source, folder, device.weak) as module:
        module._graph_pool_handle = device.pool  # pyright: ignore[reportAttributeAccessIssue]
        yield device


@contextmanager
def on_a_gpu(source: Source, folder: Path) -> Iterator[None]:
    """``transformer_engine.pytorch`` has the function of this source, and captures with CUDA's own graphs."""
    with from_source(source, folder, weak_of_cuda):
        yield


def weak_of_cuda(given: Any) -> Any:
    """The same memory as each tensor's, without holding its block."""

    def weak(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda or not value.numel():
            return value
        held = value.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(held.data_ptr(), value.device, held.nbytes())
        alias = torch.empty(0, dtype=value.dtype, device=value.device)
        return alias.set_(memory, value.storage_offset(), value.shape, value.stride())

    return tree_map(weak, given)


@contextmanager
def from_source(source: Source, folder: Path, weak: Callable[[Any], Any]) -> Iterator[ModuleType]:
    """``transformer_engine.pytorch`` has the function of this source."""
    path = folder / "graph.py"
    path.write_text(source.graph)
    known = {
        "autocast": lambda **_: nullcontext(),
        "FP8GlobalStateManager": _NoFP8,
        "graph_safe_rng_available": lambda: True,
        "make_weak_ref": weak,
        **tracker(source.distributed),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, names in imported(source.graph).items():
            patch.setitem(sys.modules, name, _module(name, names, known))
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.graph", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[PACKAGE].make_graphed_callables = module.make_graphed_callables  # pyright: ignore
        yield module


def tracker(source: str) -> dict[str, Any]:
    """What its file has for generators, and nothing else of it."""
    tree = ast.parse(source)
    tree.body = [ast.parse("from __future__ import annotations").body[0], *filter(_is_of_tracker, tree.body)]
    names: dict[str, Any] = {"contextmanager": contextmanager, "graph_safe_rng_available": lambda: True}
    exec(compile(tree, "distributed.py", "exec"), names)
    return {name: names[name] for name in TRACKER}


def _is_of_tracker(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in TRACKER for target in node.targets)
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in TRACKER


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


def _module(name: str, names: list[str], known: dict[str, Any]) -> ModuleType:
    """Classes of nothing, but for the few names that run without FP8."""
    module = ModuleType(name)
    module.__path__ = []
    own = TRACKER if name.endswith(".distributed") else ()
    for each in (*names, *own):
        setattr(module, each, known.get(each) or type(each, (), {}))
    return module


class _NoFP8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_first_fp8_module() -> bool:
        return False
