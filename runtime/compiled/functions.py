"""One compiled function for all pieces with equal ops and arguments of equal shapes.

Pieces share a function if their ops and constants are equal, and dtype, shape, strides and requires_grad of each
argument. Rows of experts may be any number; 0 or 1 rows run op by op.
Inductor compiles forward and backward of a function at its first call, with one thread, and caches the result on disk
for other ranks and later runs; a lock allows one process at a time to compile a function. A function that fails to
compile runs op by op, with a message. Pieces also run op by op without gradients (in an evaluation), and under a
dispatch mode such as the capture of an emulated graph, which cannot record a compiled function.

Nothing is compiled while a graph is captured: the steps and the warm-up before it have called every function with such
arguments. A piece that they have not called is captured op by op, with a message.
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from passes.base import RankProgram
from passes.ops.region import CompiledCall
from passes.parts import calls_in
from planner.files.atomic import open_lock_file
from planner.frozen_plan import Plan
from planner.progress import shown_if_slow
from runtime.distributed.groups import Groups

Signature = tuple[Any, ...]
ANY = -1  # in a signature: any number of rows
SECONDS_A_FUNCTION = 60  # 2 on an idle CPU (benchmarks/RESULTS.md), ten and more if many ranks share it
LEAST = 2  # minimum number of rows, as PyTorch treats lengths of 0 and 1 as constants
# without vec_isa_ok, Inductor builds and loads a program for each set of vector instructions of the processor
_OPTIONS = {"compile_threads": 1, "fx_graph_cache": True, "cpp.vec_isa_ok": True}
_ONE_AT_A_TIME = threading.Lock()  # Inductor keeps its state in its modules
_KNOWN_LENGTHS = 4096
_IS_RECORDED: ContextVar[bool] = ContextVar("a recorded graph is being captured", default=False)


@dataclass(frozen=True)
class Function:
    """A compiled function ``run(*arguments)``. ``rows``: if the number of rows is not fixed."""

    run: Callable[..., Sequence[Any]]
    rows: AnyRows | None = None

    def takes(self, rows: int | None) -> bool:
        return rows is None or self.rows is None or self.rows.fits(rows)


class AnyRows:
    """Symbolic arguments for any number of rows of experts, which differs from step to step.

    They have no values, share one symbol, and have the strides of ``examples``. The symbol's guards are assumptions of
    Inductor, such as that indices fit in 32 bits: they are read once both directions are compiled, and checked before
    each call.
    """

    def __init__(self, examples: Sequence[Tensor], counts_rows: Sequence[bool]) -> None:
        # imported late: they are slow to import, and few runs need them
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        self._environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=self._environment)
        pairs = list(zip(examples, counts_rows, strict=True))
        rows = next(x.shape[0] for x, counts in pairs if counts)
        free: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        self._length: Any = mode.from_tensor(torch.empty(rows), symbolic_context=free).shape[0]
        with mode:
            self.arguments = [_like(x, (self._length, *x.shape[1:]) if counts else x.shape) for x, counts in pairs]
        self._guards: str | None = None
        self.fits = lru_cache(_KNOWN_LENGTHS)(self._fits)

    def settle(self) -> None:
        """Read the guards; no more are added."""
        self._guards = self._environment.produce_guards_expression([self._length])

    def _fits(self, rows: int) -> bool:
        """Return whether the compiled function is valid for this number of rows."""
        return self._guards is None or bool(self._environment.evaluate_guards_expression(self._guards, [rows]))


def _like(x: Tensor, shape: Any) -> Any:
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


@dataclass
class CompileReport:
    """The compilation of ``num_functions`` for ``num_pieces``: its ``seconds``, and how many graphs, forward and
    backward, were in the cache or compiled (``made``). ``eager``: (source line, reason) of pieces that failed."""

    num_pieces: int
    num_functions: int = 0
    seconds: float = 0.0
    made: int = 0
    from_cache: int = 0
    eager: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"compiled {self.num_functions} functions for {self.num_pieces} pieces in {self.seconds:.1f} s "
            f"({self.from_cache} of {self.from_cache + self.made} graphs from the cache)"
        )
        return "\n".join([text, *(f"runs op by op: {where}: {reason}" for where, reason in self.eager)])


class CompiledPieces:
    """Runs all pieces of a rank.

    ``counts``: number of calls by (piece, kind): "compiled" as one function, "eager" op by op, "recorded" op by op into
    an emulated graph (a CUDA graph captures the function). ``extra``: added to the timeout of collectives while ranks
    compile all ``num_functions`` of the plan.
    """

    def __init__(self, program: RankProgram, *, num_functions: int = 0, emulates_casts: bool = True) -> None:
        calls = calls_of(program)
        self.extra = timedelta(seconds=SECONDS_A_FUNCTION * num_functions)
        self._emulates_casts = emulates_casts
        self.report = CompileReport(len(calls))
        self._num_expected = len({call.structure for call in calls})
        self.counts: Counter[tuple[int, str]] = Counter()
        self._functions: dict[tuple[str, Signature], Function | None] = {}
        for call in calls:
            call.run = self._run

    @classmethod
    def of(cls, plan: Plan, program: RankProgram) -> CompiledPieces:
        functions = {piece.function for piece in plan.pieces}
        return cls(program, num_functions=len(functions), emulates_casts=plan.spec["emulate_precision_casts"])

    def _run(self, call: CompiledCall, inputs: Sequence[Any]) -> Sequence[Any]:
        function = self._wanted(call, inputs) if torch.is_grad_enabled() else None
        if function is None or _is_watched():
            self.counts[call.index, "eager" if function is None else "recorded"] += 1
            return call.module(*inputs)
        self.counts[call.index, "compiled"] += 1
        return function.run(*inputs)

    def _wanted(self, call: CompiledCall, inputs: Sequence[Any]) -> Function | None:
        """Return the function of a piece, compiled now if allowed; None if it runs op by op."""
        rows = call.rows_of(inputs)
        if rows is not None and rows < LEAST:
            return None
        function = self._found(call, inputs)
        return function if function is not None and function.takes(rows) else None

    def _found(self, call: CompiledCall, inputs: Sequence[Any]) -> Function | None:
        if not (_IS_RECORDED.get() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())):
            return None if _is_watched() else self.function_of(call, inputs)
        key = _key(call, inputs)
        if key not in self._functions:
            self.report.eager.append((call.where, "a graph was captured before its compilation"))
        return self._functions.get(key)

    def function_of(self, call: CompiledCall, inputs: Sequence[Any]) -> Function | None:
        """Return the function for such arguments, compiled on first use; None if it cannot be compiled."""
        key = _key(call, inputs)
        if key not in self._functions:
            with _ONE_AT_A_TIME:
                self._functions[key] = self._compiled(call, key, call.rows_of(inputs))
        return self._functions[key]

    def _compiled(self, call: CompiledCall, key: tuple[str, Signature], rows: int | None) -> Function | None:
        start, before = time.perf_counter(), _found_and_made()
        try:
            number = f"{len(self._functions) + 1} of {max(self._num_expected, len(self._functions) + 1)}"
            with shown_if_slow(f"compiling function {number}"), _alone(key):
                function = compile_graph(call.module, key[1], rows, emulates_casts=self._emulates_casts)
            self.report.num_functions += 1
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.report.eager.append((call.where, f"{type(error).__name__}: {lines[0]}"))
            function = None
        found, made = _found_and_made()
        self.report.from_cache += found - before[0]
        self.report.made += made - before[1]
        self.report.seconds += time.perf_counter() - start
        return function


def _key(call: CompiledCall, inputs: Sequence[Any]) -> tuple[str, Signature]:
    return call.structure, signature_of(inputs, call.counts_rows)


def _is_watched() -> bool:
    """Return whether a dispatch mode of this thread must see each op, as that of a recorded graph."""
    modes = _get_current_dispatch_mode_stack()
    return not all(getattr(mode, "reads_memory_alone", False) for mode in modes)


def calls_of(program: RankProgram) -> list[CompiledCall]:
    """Return the pieces of all stages of a rank, including those in captured regions."""
    return [call for stage in program.stages for call in calls_in(stage.module.graph, stage.module)]


def signature_of(inputs: Sequence[Any], counts_rows: Sequence[bool] = ()) -> Signature:
    """Return the signature of ``inputs``. ``counts_rows``: for each, whether it may have any number of rows."""
    counts = counts_rows or [False] * len(inputs)
    pairs = zip(inputs, counts, strict=True)
    return tuple((x.dtype, *_layout_of(x, any_rows), x.requires_grad, x.device) for x, any_rows in pairs)


def _layout_of(x: Tensor, any_rows: bool) -> tuple[Any, Any]:
    """Return shape and strides; no strides if they depend on the number of rows."""
    if not any_rows:
        return x.shape, x.stride()
    return (ANY, *x.shape[1:]), x.stride() if x.stride(0) == max(x.stride()) else ()


@contextmanager
def first_calls(pieces: CompiledPieces | None, groups: Groups) -> Iterator[None]:
    """Extend timeouts during the first step, in which other ranks may compile. All ranks must call it."""
    extra = timedelta() if pieces is None else pieces.extra
    if pieces is None or not extra:
        yield
        return
    groups.limit(groups.timeout + extra)
    yield
    groups.barrier()  # wait for ranks that still compile
    groups.limit(groups.timeout)
    pieces.extra = timedelta()


def compile_graph(
    module: fx.GraphModule, signature: Signature, rows: int | None = None, *, emulates_casts: bool = True
) -> Function:
    """Compile a graph of plain ops, and its backward, with Inductor, for arguments of ``signature``.

    ``rows``: an example number, if the signature has any number of rows. Raises Inductor's errors, and ValueError for
    rows of any number that are not in row-major order.
    """
    from torch._inductor import compile as compile_by_inductor  # it takes a second to import

    own = fx.GraphModule(nn.Module(), fx.Graph())
    own.graph.output(own.graph.graph_copy(module.graph, {}))  # Inductor changes the graph that it compiles
    own.recompile()
    examples = [_example(*argument, rows=rows) for argument in signature]
    counts_rows = [shape[:1] == (ANY,) for _, shape, *_ in signature]
    symbolic = AnyRows(examples, counts_rows) if any(counts_rows) else None
    values: list[Any] = list(examples) if symbolic is None else symbolic.arguments
    # innermost hooks, so that those of a recomputed block do not count the tensors that are saved here
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        options = {**_OPTIONS, "emulate_precision_casts": emulates_casts}
        function: Any = compile_by_inductor(own, values, options)
        outputs = [x for x in function(*examples) if x.requires_grad]
        wanted = [x for x in examples if x.requires_grad]
        if outputs and wanted:  # Inductor compiles a backward at its first call
            torch.autograd.grad(outputs, wanted, list(map(torch.zeros_like, outputs)), allow_unused=True)
    if symbolic is not None:
        symbolic.settle()
    return Function(function, symbolic)


def _example(
    dtype: torch.dtype, shape: Any, stride: Any, requires_grad: bool, device: torch.device, rows: int | None = None
) -> Tensor:
    if len(shape) != len(stride):
        raise ValueError("rows of any number must be in row-major order")
    if rows is not None and shape[:1] == (ANY,):
        shape = rows, *shape[1:]
    example = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()  # ids within any table
    return example.requires_grad_(requires_grad)


def _found_and_made() -> tuple[int, int]:
    """Return the numbers of graphs that Inductor has found in its cache, and that it has compiled."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]


@contextmanager
def _alone(key: tuple[str, Signature]) -> Iterator[None]:
    """Make other processes of this machine wait until the function is compiled, and in the cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    directory = Path(cache_dir()) / "meshwright"
    directory.mkdir(parents=True, exist_ok=True)
    with open_lock_file(directory / hashlib.sha256(repr(key).encode()).hexdigest()) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def recording() -> Iterator[None]:
    """Mark that a graph is being recorded op by op."""
    token = _IS_RECORDED.set(True)
    try:
        yield
    finally:
        _IS_RECORDED.reset(token)
