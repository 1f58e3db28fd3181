"""One use of a user's torch.autograd.Function in a forward, and trials of it on drawn values.

Application   the Function and its arguments, with a Shape in place of each tensor
draw          random values of those shapes
applied       outputs, and the gradients by those tensors, of one run on given values
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import Where
from passes.program.ops.aten import has_gradient
from planner.capture.model.exchange import tensors_in

COARSE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 5e-2}
TOO_MANY_ELEMENTS = 10**8
READS_MEMORY = "depends on the strides of its arguments, which are others for parts of them"
MEMORY_FIX = "call .contiguous() on its arguments, or read them by index"
Near = Callable[[Tensor, Tensor], bool]
T = TypeVar("T")
_ORDERS: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.clone,  # dense, in the same order
    Tensor.contiguous,
    lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
)


@dataclass(frozen=True)
class Sample:
    """The distribution of drawn values, and the size of arriving gradients."""

    deviation: float
    mean: float  # not 0: all values are above it
    gradient: float
    tolerance: float  # in float64


SAMPLES = (Sample(1.0, 0.0, 1.0, 1e-6), Sample(0.5, 1.5, 1.0, 1e-6), Sample(30.0, 0.0, 1e4, 1e-3))


@dataclass(frozen=True)
class Shape:
    """Stands for a tensor argument. ``strides``: in the capture; dense if elements share memory."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, requires_grad: bool) -> Shape:
        strides = tuple(map(int, x.stride()))
        steps = sorted((s, int(n)) for s, n in zip(strides, x.shape, strict=True) if n > 1)
        is_apart = all(s > 0 for s, _ in steps) and all(s * n <= after for (s, n), (after, _) in pairwise(steps))
        return cls(tuple(map(int, x.shape)), x.dtype, requires_grad, strides if is_apart else _dense(x))

    def cut(self, sizes: tuple[int, ...]) -> Shape:
        """Return a smaller shape with its dims in the same order in memory."""
        whole = torch.empty_strided(self.sizes, self.strides, device="meta")
        return replace(self, sizes=sizes, strides=_dense(whole[tuple(map(slice, sizes))]))

    def laid_out(self, value: Tensor) -> Tensor:
        """Return a copy of ``value`` with the strides of the capture."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype).copy_(value)

    @property
    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.sizes, self.strides, device="meta").is_contiguous()

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


@dataclass(frozen=True)
class Application:
    """One use of a Function in the forward: its arguments, with Shapes in place of tensors."""

    function: type[Function]
    args: tuple[Any, ...]
    where: Where

    @classmethod
    def of(cls, function: type[Function], args: tuple[Any, ...], where: Where) -> Application:
        return cls(function, pytree.tree_map_only(Tensor, lambda x: Shape.of(x, x.requires_grad), args), where)

    @property
    def shapes(self) -> list[Shape]:
        return [leaf for leaf in pytree.tree_leaves(self.args) if isinstance(leaf, Shape)]

    @property
    def num_elements(self) -> int:
        return sum(shape.numel for shape in self.shapes)

    @property
    def name(self) -> str:
        return self.function.__qualname__.rpartition("<locals>.")[2]

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for uses that need only one check."""
        leaves, structure = pytree.tree_flatten(self.args)
        return (self.function, structure, *(leaf if is_plain(leaf) else id(leaf) for leaf in leaves))

    def given(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments, with ``values`` in place of tensors."""
        rest = iter(values)
        return pytree.tree_map_only(Shape, lambda _: next(rest), self.args)

    def attempts(self, small: int) -> Iterator[Application]:
        """Yield the use in float64, then in its own precision; above ``small`` elements, small sizes first."""
        for sized in [self._shrunk(), self] if self.num_elements > small else [self]:
            if sized.num_elements <= TOO_MANY_ELEMENTS:
                yield sized._with_shapes(_in_float64)
                yield sized

    def first(
        self, small: int, run: Callable[[Application], T | None], *, through: tuple[type[Exception], ...] = ()
    ) -> T | None:
        """Return the first result over all attempts that is not None. ``through``: errors to raise."""
        for attempt in self.attempts(small):
            try:
                found = run(attempt)
            except through:
                raise
            except Exception:  # whatever code raises on tensors that it was not written for
                continue
            if found is not None:
                return found
        return None

    def _with_shapes(self, change: Callable[[Shape], Shape]) -> Application:
        return replace(self, args=pytree.tree_map_only(Shape, change, self.args))

    def _shrunk(self) -> Application:
        """Cut leading dims down, equal ones alike; sizes that are the last dim of some matrix stay."""
        kept = {shape.sizes[-1] for shape in self.shapes if len(shape.sizes) > 1}
        leading = dict.fromkeys(size for shape in self.shapes for size in shape.sizes[:-1] if size not in kept)
        small = {size: min(size, 2 + position) for position, size in enumerate(leading)}
        return self._with_shapes(lambda shape: shape.cut(tuple(small.get(n, n) for n in shape.sizes)))


def is_plain(leaf: object) -> bool:
    """Return whether the printed form of an argument identifies it."""
    return isinstance(leaf, (Shape, int, float, str, type(None), torch.dtype, torch.device))


def _in_float64(shape: Shape) -> Shape:
    return replace(shape, dtype=torch.float64) if shape.dtype.is_floating_point else shape


# ---- runs on values


def draw(use: Application, sample: Sample) -> list[Tensor]:
    """Return a value for each tensor: near 0, positive, or far from 0, as ``sample`` says."""
    return [_value(shape, sample) for shape in use.shapes]


def _value(shape: Shape, sample: Sample) -> Tensor:
    if not has_gradient(shape.dtype):
        return shape.laid_out(torch.randint(2, shape.sizes))
    value = torch.randn(shape.sizes, dtype=torch.float64).mul(sample.deviation)
    return shape.laid_out(value.abs() + sample.mean if sample.mean else value)


def follows_memory(run: Callable[[list[Tensor]], list[Tensor | None]], values: Sequence[Tensor], near: Near) -> bool:
    """Return whether ``run`` computes something else from equal values with other strides."""
    expected = run(list(values))
    for order in _ORDERS:
        try:
            found = run([order(v) for v in values])
        except Exception:  # an order that it refuses, as it would in a run
            continue
        pairs = zip(expected, found, strict=True)
        if not all(a is b or (a is not None and b is not None and near(a, b)) for a, b in pairs):
            return True
    return False


def _dense(x: Tensor) -> tuple[int, ...]:
    return torch.empty_strided(x.shape, x.stride(), device="meta").clone().stride()


def applied(
    use: Application, values: Sequence[Tensor], run: Callable[..., Any], arriving: Callable[[int, Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return outputs, and the gradient of each tensor that requires one (None: the backward gives none).

    ``arriving(position, output)``: the gradient that arrives at an output.
    """
    leaves = [
        v.detach().clone().requires_grad_() if s.requires_grad and has_gradient(v.dtype) else v.clone()
        for s, v in zip(use.shapes, values, strict=True)
    ]
    with torch.enable_grad():
        # not the leaves themselves: the Function may write into them
        outputs = tensors_in(run(*use.given([v.clone() if v.requires_grad else v for v in leaves])))
    gradients = [arriving(i, o) if has_gradient(o.dtype) else o for i, o in enumerate(outputs)]
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    asked = [v for v in leaves if v.requires_grad]
    if not pairs or not asked:
        return [o.detach() for o in outputs], [None] * len(asked)
    found = torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
    return [o.detach() for o in outputs], list(found)


@contextmanager
def on_the_side() -> Iterator[None]:
    """Run trials without warnings, and restore the random generator."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


class LowestPrecision(TorchDispatchMode):
    """Notes the coarsest dtype in which ops compute, so that float32 inside a Function is not compared as float64."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tensors_in(result):
            if has_gradient(value.dtype):
                self.dtype = max(self.dtype, value.dtype.to_real(), key=lambda dtype: torch.finfo(dtype).eps)
        return result
