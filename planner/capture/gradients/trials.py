"""Test properties of a user's torch.autograd.Function on small random tensors of its input shapes.

    derived   d(Function.apply)/dx equals d(Function.forward)/dx by autograd, as of a fused or memory-saving Function; a
              straight-through estimator or a reversed gradient is not, and stays one op with its own backward B
    reached   the tensors by which B gives a gradient at all
    linear    B(a + b) = B(a) + B(b) and B(0) = 0, for gradients of very different sizes
    cuts      apply on the parts of its inputs gives the parts of outputs and gradients, and of an input that every part
              reads in full the sum of gradients; in halves and in small parts, also with one far larger part
    draws     whether the forward draws random numbers
    in_order  whether it computes something else where its tensors do not lie in memory in the order of their dims

Only tested properties are used: a Function that does not run by itself is computed in full, from full gradients.
Values are drawn around 0, positive, far from 0 (with larger rounding errors: in float64 only), and for ``derived`` next
to 0, where a root or a quotient may be bounded. There, a value that only the derivative makes non-finite is a
difference; a value that the Function makes non-finite is skipped; other values are compared by norm. Only these
trials run a backward while planning: after it, on a torch built for CUDA, a fork of this process cannot run another
(launchers here start processes that have not planned).
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function

from passes.program.ops.aten import has_gradient
from passes.program.ops.own_backward import Cut, Facts
from planner.capture.gradients.applications import (
    COARSE,
    SAMPLES,
    Application,
    LowestPrecision,
    Sample,
    applied,
    draw,
    follows_memory,
    on_the_side,
)

MANY_ELEMENTS = 10**5
SIZES = (1e-6, 1e-3, 1.0, 1e3, 1e8)  # of arriving gradients
NUM_PARTS = (2, 4)
LARGER = 1e3  # one part than the other
TOLERANCE = 1e-9  # in float64

Gradients = list[Tensor | None]
Arriving = Callable[[int, Tensor], Tensor]
NOTHING = 1e-2  # a gradient that is smaller than this much of the arriving one, times the tolerance, is rounding
NEXT_TO_ZERO = Sample(1e-9, 0.0, 1.0, 1e-6)
MANY_ELEMENTS_OF_A_FORWARD = 10**6
_PARTS = ("_higher_order_ops", "_library", "_functorch", "_dynamo", "nn.modules", "utils.checkpoint")
_NOT_OURS = tuple(f"torch.{name}" for name in _PARTS)


class RandomBackward(Exception):
    """The backward draws random numbers."""


class FollowsMemory(Exception):
    """The Function computes something else from other strides, and those of the capture are not contiguous."""


def facts_of(use: Application) -> Facts:
    """Return the facts that trials show. Raises RandomBackward, FollowsMemory."""

    def tried(attempt: Application) -> Facts:
        with on_the_side(), LowestPrecision() as seen:
            return _Trial(attempt, seen).facts()

    found = use.first(MANY_ELEMENTS, tried, through=(RandomBackward, FollowsMemory))
    return found or Facts(tuple(shape.requires_grad for shape in use.shapes), tried=False)


class _Trial:
    """One use of a Function at one size and precision; ``seen`` has the coarsest dtype so far."""

    def __init__(self, use: Application, seen: LowestPrecision) -> None:
        self.use, self.seen = use, seen

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.seen.dtype)

    def facts(self) -> Facts:
        reached, draws = self._reached()
        if draws:
            return Facts(reached, draws=True)
        return Facts(reached, self._is_linear(), tuple(self._cuts()), in_order=self._reads_in_order())

    def _reads_in_order(self) -> bool:
        def run(values: list[Tensor]) -> list[Tensor | None]:
            return [x for made in self._run(values, lambda _, output: torch.ones_like(output)) for x in made]

        follows = follows_memory(run, draw(self.use, SAMPLES[0]), self._equal)
        if follows and not all(shape.is_contiguous for shape in self.use.shapes):
            raise FollowsMemory
        return follows

    def _run(self, values: Sequence[Tensor], arriving: Arriving) -> tuple[list[Tensor], Gradients]:
        return applied(self.use, values, self.use.function.apply, arriving)

    def _reached(self) -> tuple[tuple[bool, ...], bool]:
        reached = [False] * len(self.use.shapes)
        asked = [i for i, shape in enumerate(self.use.shapes) if shape.requires_grad]
        draws = False
        for sample in SAMPLES:
            values = draw(self.use, sample)
            before, between = _generators(), []

            def arriving(_: int, output: Tensor, between: list[object] = between) -> Tensor:
                between.append(_generators())
                return torch.ones_like(output)

            _, found = self._run(values, arriving)
            after = _generators()
            draws |= before != (between or [after])[0]
            if between and between[-1] != after:
                raise RandomBackward
            for position, gradient in zip(asked, found, strict=True):
                reached[position] |= gradient is not None
        return tuple(reached), draws

    # ---- linear

    def _is_linear(self) -> bool:
        pairs = [*zip(SIZES, SIZES, strict=True), *itertools.pairwise(SIZES)]
        return all(self._adds_up(sample, a, b) for sample in SAMPLES for a, b in pairs)

    def _adds_up(self, sample: Sample, size_a: float, size_b: float) -> bool:
        values = draw(self.use, sample)
        outputs, _ = self._run(values, lambda _, output: torch.zeros_like(output))
        a, b = ([_random(o, size) for o in outputs] for size in (size_a, size_b))
        of_a, of_b, of_both, of_nothing = (
            self._run(values, lambda i, _, g=g: g[i])[1]
            for g in (a, b, [x + y for x, y in zip(a, b, strict=True)], [torch.zeros_like(x) for x in a])
        )
        return all(
            self._equal(_sum([x, y]), z) and self._equal(None if n is None else torch.zeros_like(n), n)
            for x, y, z, n in zip(of_a, of_b, of_both, of_nothing, strict=True)
        )

    def _equal(self, a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return equal_up_to_rounding(a, b, self.tolerance)

    # ---- cuts

    def _cuts(self) -> Iterator[Cut]:
        values = draw(self.use, SAMPLES[0])
        outputs, _ = self._run(values, lambda _, output: torch.ones_like(output))
        for dim in range(min(o.dim() for o in outputs)):
            for cut in _possible(dim, [o.shape for o in outputs], [v.shape for v in values]):
                if all(self._holds(cut, *trial) for trial in itertools.product(NUM_PARTS, SAMPLES, (False, True))):
                    yield cut
                    break

    def _holds(self, cut: Cut, num_parts: int, sample: Sample, ramp: bool) -> bool:
        values = draw(self.use, sample)
        if ramp:
            values = [_ramped(v, dim) for v, dim in zip(values, cut.inputs, strict=True)]
        arriving: dict[int, Tensor] = {}
        whole = self._run(values, lambda i, o: arriving.setdefault(i, _random(o, 1.0, cut.dim if ramp else None)))
        given = [_parts(v, dim, num_parts) for v, dim in zip(values, cut.inputs, strict=True)]
        pulled = {i: _parts(g, cut.dim, num_parts) for i, g in arriving.items()}
        parts = []
        for part in range(min(num_parts, whole[0][0].shape[cut.dim])):
            parts.append(self._run([g[part] for g in given], lambda i, _, part=part: pulled[i][part]))
        outputs = [torch.cat([made[i] for made, _ in parts], cut.dim) for i in range(len(whole[0]))]
        return all(map(self._equal, outputs, whole[0])) and self._gradients_hold(cut, whole[1], [g for _, g in parts])

    def _gradients_hold(self, cut: Cut, whole: Gradients, parts: list[Gradients]) -> bool:
        asked = [dim for shape, dim in zip(self.use.shapes, cut.inputs, strict=True) if shape.requires_grad]
        for position, (dim, expected) in enumerate(zip(asked, whole, strict=True)):
            held = [part[position] for part in parts]
            found = _sum(held) if dim is None or any(h is None for h in held) else torch.cat(held, dim)  # pyright: ignore
            if not self._equal(found, expected):
                return False
        return True


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative tolerance of norms, for ops that compute in ``dtype``."""
    return TOLERANCE if dtype == torch.float64 else COARSE.get(dtype, 0.5)


def equal_up_to_rounding(a: Tensor, b: Tensor, tolerance: float, least: float = 0.0) -> bool:
    """Compare up to rounding of the norm, or of ``least``; NaN and Inf must be at the same places."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not has_gradient(a.dtype):
        return torch.equal(a, b)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    a, b = a[finite], b[finite]
    return (a - b).norm().item() <= tolerance * max(a.norm().item(), b.norm().item(), least)


def _random(like: Tensor, size: float, ramp_dim: int | None = None) -> Tensor:
    if not has_gradient(like.dtype):
        return like
    drawn = torch.randn(like.shape, dtype=torch.float64).mul(size).to(like.dtype)
    return drawn if ramp_dim is None else _ramped(drawn, ramp_dim)


def _ramped(x: Tensor, dim: int | None) -> Tensor:
    """Multiply the second half along ``dim``, so that statistics of the parts differ from those of the full tensor."""
    if dim is None or not has_gradient(x.dtype):
        return x
    factors = torch.ones(x.shape[dim], dtype=torch.float64)
    factors[x.shape[dim] // 2 :] = LARGER
    return (x * factors.view([-1 if d == dim else 1 for d in range(x.dim())])).to(x.dtype)


def _parts(x: Tensor, dim: int | None, num_parts: int) -> Sequence[Tensor]:
    return [x] * num_parts if dim is None else torch.tensor_split(x, min(num_parts, x.shape[dim]), dim)


def _sum(held: Sequence[Tensor | None]) -> Tensor | None:
    found = [h for h in held if h is not None]
    return sum(found[1:], found[0]) if found else None


def _possible(dim: int, outputs: Sequence[torch.Size], inputs: Sequence[torch.Size]) -> Iterator[Cut]:
    """Yield ways to shard the inputs if all outputs are cut along ``dim``: aligned by last dims, or by first."""
    size = outputs[0][dim]
    if size < 2 or any(shape[dim] != size for shape in outputs):
        return
    ndim = len(outputs[0])
    for places in ([dim + len(shape) - ndim for shape in inputs], [dim] * len(inputs)):
        at = tuple(p if 0 <= p < len(s) and s[p] == size else None for p, s in zip(places, inputs, strict=True))
        if any(p is not None for p in at):
            yield Cut(dim, at)


def _generators() -> tuple[object, ...]:
    """Return the states of the random generators of PyTorch, Python and NumPy."""
    kind, keys, *rest = np.random.get_state()
    return (torch.random.get_rng_state().numpy().tobytes(), random.getstate(), str(kind), bytes(keys), *rest)  # pyright: ignore


def is_of_torch(function: type[Function]) -> bool:
    """Return whether PyTorch itself uses the Function to make its ops differentiable."""
    return function.__module__.startswith(_NOT_OURS)


def is_derived(use: Application) -> bool | None:
    """Return whether the backward is the derivative; None if unknown: it does not run, or gives nothing finite."""
    return use.first(MANY_ELEMENTS_OF_A_FORWARD, _agree_on_samples)


def _agree_on_samples(use: Application) -> bool | None:
    """Compare on all samples in float64; if the Function itself is coarser, only on the first that is conclusive."""
    known = None
    for sample in (*SAMPLES, NEXT_TO_ZERO):
        equal, dtype = _agree(use, sample)
        known = known if equal is None else equal
        if known is False or (known and dtype != torch.float64):
            break
    return known


def _agree(use: Application, sample: Sample) -> tuple[bool | None, torch.dtype]:
    """Return whether both gradients are equal on one draw of values, and the coarsest dtype of the ops inside. None in
    place of a truth value: nothing finite is left to compare.
    """
    with on_the_side(), LowestPrecision() as seen:
        own = _gradients(use, use.function.apply, sample)
        derived = _gradients(use, lambda *args: forward_alone(use.function, args), sample)
    tolerance = sample.tolerance if seen.dtype == torch.float64 else COARSE.get(seen.dtype, 0.5)
    compared = None
    for a, b in zip(own, derived, strict=True):
        finite = torch.isfinite(a)
        if finite.any():
            compared = True
            rounding = NOTHING * sample.gradient * int(finite.sum()) ** 0.5
            if not equal_up_to_rounding(a[finite], b[finite], tolerance, rounding):
                return False, seen.dtype
    return compared, seen.dtype


def _gradients(use: Application, run: Callable[..., Any], sample: Sample) -> list[Tensor]:
    """Return the gradients of all tensors that require one, from random gradients of outputs; zeros if none."""
    torch.manual_seed(0)
    values = draw(use, sample)
    _, found = applied(use, values, run, lambda _, output: _random(output, sample.gradient))
    asked = [v for s, v in zip(use.shapes, values, strict=True) if s.requires_grad]
    return [torch.zeros_like(v) if g is None else g for v, g in zip(asked, found, strict=True)]


def forward_alone(function: type[Function], args: tuple[Any, ...]) -> Any:
    """Run the ops of the Function's forward, without its backward."""
    if function.setup_context is not Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(args), *args)


class _Context:
    """Stands for ``ctx`` in a forward that runs by itself: accepts anything that is stored, and ignores it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore
