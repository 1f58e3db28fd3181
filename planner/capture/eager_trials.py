"""Compare the capture with the model in eager mode: a forward can detect tracing in ways that no list has.

    eager loss        model(**batch), nothing replaced
    captured loss     the canonical graph on the same weights and the same batch

planner.capture.python.eager_answers has the known ways. A small model with weights runs on its own values. If the
forward branches on tracing, drawn weights in float64 are enough: they also serve for a model on the meta device, and
for a capture in another dtype than the model's. The batches together take both sides of a branch on a value:

    if not is_tracing(x) and (x == 0).all(): mask = None        eager mode skips a mask that masks nothing

    integers 0 and 1        ids, labels and masks alike
    integers 1              no padding
    one input counts        0 1 2 …: positions of one document

A graph that computes in half precision, as under autocast, rounds in other places than eager mode. It is compared in
float64 as well; if eager mode cannot run in float64, it may differ by as much as its own rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import PlanError, Where
from passes.program.ops.aten import HALF, tensors_of
from passes.program.program import Program
from planner.capture.data_dependence import not_captured
from planner.capture.graphs_equal import InFloat64, drawn, widened
from planner.capture.model.eager import caches_off, in_eager_mode
from planner.capture.model.exchange import has_values, python_generators_kept, registry_kept, tensors_in
from planner.capture.outputs import plain_structure
from planner.capture.python.state import PythonState
from planner.capture.user_lines import CallSites

MOST_ELEMENTS = 1 << 26  # of drawn weights
CHEAP = 10**8  # elements of weights times elements of inputs
DEAR = 2 * 10**10  # if the capture had to take another path than eager mode
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
OF_HALF = 1e-2
OF_DRAWN = 2e-5  # a forward in float64 still computes norms or its loss in float32
_FIX = "compute the same with and without tracing: do not test for tracing or for classes of tensors"


class _Truths(TorchDispatchMode):
    """Notes the truth values that a forward reads from tensors in eager mode, by line."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._sites, self.read = CallSites(model), defaultdict[str, set[Any]](set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read[str(self._sites.here())].add(made)
        return made


class _Trials:
    """Owns the truth values that forwards have read, by line. ``values``: drawn weights; None: the model's own."""

    def __init__(self, model: nn.Module, program: Program, values: dict[str, Tensor] | None = None) -> None:
        self.model, self.program, self.values = model, program, values
        self.read = defaultdict[str, set[Any]](set)

    @property
    def took_both_sides(self) -> bool:
        return all(len(answers) == 2 for answers in self.read.values())

    def losses(self, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses in eager mode and as captured; none if a forward fails, or draws random numbers."""
        model, truths, before, values = self.model, _Truths(self.model), torch.get_rng_state(), self.values
        with _put_back(model), in_eager_mode(), nullcontext() if values is None else caches_off(model), truths:
            eager = _scalars(lambda: model(**batch) if values is None else functional_call(model, values, (), batch))
            draws = not torch.equal(before, torch.get_rng_state())
        if not eager or draws:
            return [], []
        for line, answers in truths.read.items():
            self.read[line] |= answers
        return eager, _scalars(lambda: self.interpreted(batch))

    def interpreted(self, batch: Mapping[str, Tensor]) -> Any:
        program, given = self.program, list[Any]()
        named = self.model.named_parameters, self.model.named_buffers
        own = {name: held for each in named for name, held in each(remove_duplicate=False)} | (self.values or {})
        for node in program.graph.graph.find_nodes(op="placeholder"):
            if node.name in program.inputs:
                given.append(batch[program.inputs[node.name]])
            elif node.name in program.constants:
                given.append(program.constants[node.name].clone())
            else:
                given.append(own[program.parameters.get(node.name) or program.buffers[node.name]].detach().clone())
        interpreter = fx.Interpreter if self.values is None else InFloat64
        with torch.no_grad():
            return interpreter(program.graph).run(*given)


def refuse_another_forward(model: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> bool:
    """Raise PlanError if the captured loss differs from that in eager mode. Return whether they were compared on
    batches that together take each side of every branch on a value.
    """
    if not _can_run(model, inputs, DEAR if program.traced else CHEAP):
        return False
    trials, are_compared = _Trials(model, program), True
    for fill in (_ones, _mixed) if program.traced else (_mixed,):
        batch = {name: fill(tensor) for name, tensor in inputs.items()}
        eager, captured = trials.losses(batch)
        are_compared &= bool(captured)
        if captured and not _has(eager, captured[0]):
            is_same = _is_same_in_float64(model, program, batch)
            if not is_same and not _is_rounding(trials, batch, eager, captured[0]):
                raise _another_loss(model, program, batch, eager[0], captured[0])
            are_compared &= is_same
    return are_compared and trials.took_both_sides


def _is_same_in_float64(model: nn.Module, program: Program, batch: Mapping[str, Tensor]) -> bool:
    """Return whether eager mode has the captured loss in float64, which autocast does not cast."""
    wide = _Trials(model, program, _widened_values(model))
    eager, captured = wide.losses({name: widened(tensor) for name, tensor in batch.items()})
    return bool(captured) and any(_is_close(loss, captured[0], OF_DRAWN, equal_nan=True) for loss in eager)


def _is_rounding(trials: _Trials, batch: Mapping[str, Tensor], eager: list[Tensor], captured: Tensor) -> bool:
    """Return whether ``captured`` differs from the eager loss by about as much as from the same graph in float64."""
    if not any(value.dtype in HALF for node in trials.program.graph.graph.nodes for value in tensors_of(node)):
        return False
    wide = _Trials(trials.model, trials.program, _widened_values(trials.model))
    exact = _scalars(lambda: wide.interpreted({name: widened(tensor) for name, tensor in batch.items()}))
    rounded = float((captured.double() - exact[0].double()).abs()) if exact else 0.0
    return any(torch.allclose(x.double(), captured.double(), rtol=OF_HALF, atol=4 * rounded) for x in eager)


def _widened_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: widened(value.detach()) for name, value in chain(model.named_parameters(), model.named_buffers())}


def _another_loss(
    model: nn.Module, program: Program, batch: Mapping[str, Tensor], eager: Tensor, captured: Tensor
) -> PlanError:
    with _put_back(model), in_eager_mode(), caches_off(model):
        without_cache = _scalars(lambda: model(**batch))
    if _has(without_cache, captured):
        return PlanError(
            f"with its key-value cache on, the model's loss is {float(eager):.6g}; with it off, as in a training step, "
            f"{float(captured):.6g}",
            where="use_cache",
            fix="set model.config.use_cache = False (with it on, Hugging Face models ignore the documents in "
            "position_ids)",
        )
    what = f"in eager mode its loss is {float(eager):.6g}, but traced it is {float(captured):.6g}"
    return not_captured(what, next(iter(program.traced), Where()), _FIX)


def _can_run(model: nn.Module, inputs: Mapping[str, Tensor], most: int) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    size, tokens = sum(t.numel() for t in tensors), sum(t.numel() for t in inputs.values())
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    floating = {t.dtype for t in tensors if t.is_floating_point()}
    return plain and floating <= set(TOLERANCE) and size * tokens <= most


def _has(losses: list[Tensor], captured: Tensor) -> bool:
    """Return whether the captured loss is among those of a forward; it may be infinite in both."""
    return any(_is_close(loss, captured, TOLERANCE.get(loss.dtype, OF_HALF), equal_nan=True) for loss in losses)


def _is_close(loss: Tensor, other: Tensor, tolerance: float, *, equal_nan: bool) -> bool:
    return torch.allclose(loss.double(), other.double(), rtol=tolerance, atol=1e-7, equal_nan=equal_nan)


def agrees_on_both_sides(model: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> bool:
    """Return whether both losses are equal on drawn weights, on both sides of each branch on a value."""
    values, tokens = _drawn_values(model), sum(tensor.numel() for tensor in inputs.values())
    if values is None or sum(v.numel() for v in values.values()) * tokens > DEAR:
        return False
    trials = _Trials(model, program, values)
    for batch in _batches(inputs):
        eager, captured = trials.losses(batch)
        if not eager:  # numbers that are no ids of the model, or dropout
            continue
        if not captured or not any(_is_close(loss, captured[0], OF_DRAWN, equal_nan=False) for loss in eager):
            return False
    return bool(trials.read) and trials.took_both_sides


def _drawn_values(model: nn.Module) -> dict[str, Tensor] | None:
    """Return drawn parameters and own buffers, by name; None if they are too large, or not dense and real."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_plain = all(t.layout is torch.strided and not t.is_complex() for t in tensors.values())
    if not is_plain or sum(t.numel() for t in tensors.values()) > MOST_ELEMENTS:
        return None
    if not all(has_values(buffer) and buffer.device.type == "cpu" for buffer in model.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    values = {n: _drawn(p, generator) for n, p in model.named_parameters()}
    return values | {n: widened(b.detach().clone()) for n, b in model.named_buffers()}


def _drawn(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a parameter: vectors, such as the weights of norms, near 1; rows of matrices with a norm near 1."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    noise = drawn(parameter, generator)
    value = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + noise / 4
    return value.requires_grad_(parameter.requires_grad)


def _batches(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    fills: list[Mapping[str, Callable[[Tensor], Tensor]]] = [
        dict.fromkeys(inputs, _mixed),
        dict.fromkeys(inputs, _ones),
    ]
    counted = (n for n, tensor in inputs.items() if tensor.dim() and not tensor.is_floating_point())
    fills += [{**fills[0], name: _counting} for name in counted]
    for fill in fills:
        yield {name: widened(fill[name](tensor)) for name, tensor in inputs.items()}


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _mixed(tensor: Tensor) -> Tensor:
    return drawn(tensor, torch.Generator().manual_seed(0)).to(tensor.dtype)


def _counting(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[-1]).to(tensor.dtype).expand(tensor.shape).contiguous()


def _scalars(run: Callable[[], Any]) -> list[Tensor]:
    """Return the scalars among the outputs of ``run``; none if it fails, as it may on unusual values."""
    try:
        found = tensors_in(plain_structure(run()))
    except Exception:
        return []
    return [t.detach() for t in found if t.numel() == 1 and t.is_floating_point()]


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restore the model, and all random generators, afterwards."""
    state, buffers = PythonState(model), [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with python_generators_kept(), torch.random.fork_rng(devices=[]), registry_kept(model.modules()):
            yield
    finally:
        state.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
