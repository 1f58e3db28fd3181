"""Is the captured forward the one that runs? A small model with weights is run once unchanged, and once as captured.

    eager loss        model(**batch), nothing replaced
    captured loss     the canonical graph on the same weights and the same batch

A forward can find out that it is traced in ways that no list knows (planner.capture.python.eager_answers holds those
known), and then compute something else. The two are compared if that is cheap, and the loss does not depend on random
numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from passes.program.program import Program
from planner.capture.model.caches import caches_off
from planner.capture.model.compiled import in_eager_mode
from planner.capture.model.exchange import registry_kept
from planner.capture.outputs import plain_structure
from planner.capture.python.state import PythonState

CHEAP = 10**8  # elements of weights times elements of inputs
DEAR = 2 * 10**10  # if the capture had to take another path than eager mode
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_FIX = "compute the same with and without tracing: do not test for tracing or for classes of tensors"


def refuse_another_forward(model: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> None:
    """Raise PlanError if the captured loss differs."""
    if not _can_run(model, inputs, DEAR if program.traced else CHEAP):
        return
    for fill in (_ones, _mixed) if program.traced else (_mixed,):
        batch = {name: fill(tensor) for name, tensor in inputs.items()}
        with _put_back(model), in_eager_mode():
            before = torch.get_rng_state()
            eager = _scalars(lambda b=batch: model(**b))
            draws = not torch.equal(before, torch.get_rng_state())
        if not eager or draws:  # it fails on these values, or its loss is another in each call
            continue
        captured = _scalars(lambda b=batch: _interpret(program, model, b))
        if captured and not any(_close([loss], captured) for loss in eager):
            with _put_back(model), in_eager_mode(), caches_off(model):
                without_cache = _scalars(lambda b=batch: model(**b))
            if any(_close([loss], captured) for loss in without_cache):
                raise PlanError(
                    f"with its key-value cache on, the model's loss is {float(eager[0]):.6g}; with it off, as in a "
                    f"training step, {float(captured[0]):.6g}",
                    where="use_cache",
                    fix="set model.config.use_cache = False (with it on, Hugging Face models ignore the documents in "
                    "position_ids)",
                )
            where = next(iter(program.traced), Where())
            raise PlanError(
                f"the model cannot be captured: in eager mode its loss is {float(eager[0]):.6g}, but traced it is "
                f"{float(captured[0]):.6g}",
                where=where,
                fix=_FIX,
            )


def _can_run(model: nn.Module, inputs: Mapping[str, Tensor], most: int) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    size, tokens = sum(t.numel() for t in tensors), sum(t.numel() for t in inputs.values())
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    floating = {t.dtype for t in tensors if t.is_floating_point()}
    return plain and floating <= set(TOLERANCE) and size * tokens <= most


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _mixed(tensor: Tensor) -> Tensor:
    """Integers 0 and 1, which are ids, labels and masks alike."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return torch.randint(2, tensor.shape, generator=generator).to(tensor.dtype)


def _scalars(run: Callable[[], Any]) -> list[Tensor]:
    """The numbers among the outputs; none if it fails, as it may on unusual values."""
    try:
        leaves = pytree.tree_leaves(plain_structure(run()))
    except Exception:
        return []
    return [t.detach() for t in leaves if isinstance(t, Tensor) and t.numel() == 1 and t.is_floating_point()]


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return all(torch.allclose(a.double(), b.double(), rtol=_tolerance(a), atol=1e-7, equal_nan=True) for a, b in pairs)


def _tolerance(value: Tensor) -> float:
    return TOLERANCE.get(value.dtype, 1e-2)


def _interpret(program: Program, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    given: list[Any] = []
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.constants:
            given.append(program.constants[node.name].clone())
        elif node.name in program.inputs:
            given.append(batch[program.inputs[node.name]])
        else:
            fqn = program.parameters.get(node.name) or program.buffers[node.name]
            owner, _, name = fqn.rpartition(".")
            given.append(getattr(model.get_submodule(owner), name).detach().clone())
    with torch.no_grad():
        return fx.Interpreter(program.graph).run(*given)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """The model, and all generators of random numbers, as they were."""
    state, buffers = PythonState(model), [(b, b.detach().clone()) for b in model.buffers()]
    generators = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), registry_kept(model.modules()):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        state.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
