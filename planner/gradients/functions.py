"""Is the backward of a user's torch.autograd.Function the derivative of its forward? A plan can only keep it if so.

torch.export keeps what the forward of a Function computes, and gradients are derived from that again. For a fused or
memory-saving Function it is the same; for a straight-through estimator or a reversed gradient it is not. So each
distinct use is tried once, on small random tensors of the shapes it was captured with:

    d(Function.apply)/dx   against   d(Function.forward)/dx by autograd

Values are drawn near 0, positive, and far from 0 (where rounding counts for more: in float64 only); what is not finite
on either side is not compared. Compared is the norm of the difference.

This is the one place where planning runs a backward: after it, on a torch built for CUDA, a fork of this process cannot
run another (launchers here start processes that have not planned).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import PlanError, Where

FIX = (
    "write it without a Function: `x + (f(x) - x).detach()` passes a gradient straight through, "
    "`(1 - c) * x.detach() + c * x` multiplies it by c"
)
COARSE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 5e-2}
NOTHING = 1e-2  # a gradient that is smaller than this much of the arriving one, times the tolerance, is rounding
MANY_ELEMENTS = 10**6
TOO_MANY_ELEMENTS = 10**8
_PARTS = ("_higher_order_ops", "_library", "_functorch", "_dynamo", "nn.modules", "utils.checkpoint")
_NOT_OURS = tuple(f"torch.{name}" for name in _PARTS)


@dataclass(frozen=True)
class Sample:
    """How values are drawn, and how large the arriving gradients are."""

    deviation: float
    mean: float  # not 0: all values are above it
    gradient: float
    tolerance: float  # in float64


SAMPLES = (Sample(1.0, 0.0, 1.0, 1e-6), Sample(0.5, 1.5, 1.0, 1e-6), Sample(30.0, 0.0, 1e4, 1e-3))


@dataclass(frozen=True)
class Shape:
    """Stands for a tensor that the Function was given."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


@dataclass(frozen=True)
class Application:
    """One use of a Function in the forward: what it was given, with Shapes in the place of tensors."""

    function: type[Function]
    args: tuple[Any, ...]
    where: Where

    @classmethod
    def of(cls, function: type[Function], args: tuple[Any, ...], where: Where, *, inner: bool) -> Application:
        """``inner``: within the forward of another Function, where no tensor shows that it needs a gradient."""

        def shape(tensor: Tensor) -> Shape:
            sizes = tuple(int(n) for n in tensor.shape)
            return Shape(sizes, tensor.dtype, tensor.requires_grad or (inner and _has_gradient(tensor.dtype)))

        return cls(function, pytree.tree_map_only(Tensor, shape, args), where)

    @property
    def shapes(self) -> list[Shape]:
        return [leaf for leaf in pytree.tree_leaves(self.args) if isinstance(leaf, Shape)]

    @property
    def name(self) -> str:
        return self.function.__qualname__.rpartition("<locals>.")[2]

    def key(self) -> tuple[Any, ...]:
        """Equal for uses of which one check is enough."""
        leaves, structure = pytree.tree_flatten(self.args)
        plain = (Shape, int, float, str, type(None), torch.dtype)
        return (self.function, structure, *(leaf if isinstance(leaf, plain) else id(leaf) for leaf in leaves))


def check_custom_gradients(applications: list[Application], mode: FakeTensorMode) -> Iterator[str]:
    """Notes on Functions that could not be tried. Raises PlanError at one whose backward is not derived.

    ``mode``: that of the model which was exported, for Functions that hold modules of it.
    """
    distinct = {use.key(): use for use in reversed(applications)}  # of equal ones the first
    unknown: dict[type[Function], Application] = {}
    for use in reversed(distinct.values()):
        if use.function.__module__.startswith(_NOT_OURS):
            continue
        equal = _is_derived(use)
        if equal is None and _gives_no_gradient(use, mode):
            equal = False
        if equal is None:
            unknown.setdefault(use.function, use)
        elif not equal:
            raise PlanError(
                f"the backward of {use.name} is not the derivative of its forward, and would be lost: "
                "a plan derives gradients from the forward",
                where=use.where,
                fix=FIX,
            )
    for use in unknown.values():
        yield (
            f"{use.name} at {use.where}: its own backward is not used, gradients are derived from its forward "
            "(that both are equal could not be checked)"
        )


def _is_derived(use: Application) -> bool | None:
    """None where it cannot be told: the Function does not run by itself, or gives nothing finite."""
    if not any(shape.requires_grad for shape in use.shapes):
        return True
    for attempt in _attempts(use):
        try:
            equal = _agree_on_samples(attempt)
        except Exception:  # whatever the user's code raises on tensors that it was not written for
            continue
        if equal is not None:
            return equal
    return None


def _agree_on_samples(use: Application) -> bool | None:
    """All samples in float64; where the Function itself is coarser, the first that says anything."""
    known = None
    for sample in SAMPLES:
        equal, dtype = _agree(use, sample)
        known = known if equal is None else equal
        if known is False or (known and dtype != torch.float64):
            break
    return known


def _gives_no_gradient(use: Application, mode: FakeTensorMode) -> bool:
    """Whether its forward certainly has no derivative: it computes without gradients, to compute again later."""
    def tensor(shape: Shape) -> Tensor:
        return torch.empty(shape.sizes, dtype=shape.dtype, requires_grad=shape.requires_grad).view(shape.sizes)

    try:
        with mode, torch.enable_grad():
            outputs = pytree.tree_leaves(_forward(use.function, pytree.tree_map_only(Shape, tensor, use.args)))
    except Exception:  # as above
        return False
    return not any(isinstance(o, Tensor) and o.requires_grad for o in outputs)


def _attempts(use: Application) -> Iterator[Application]:
    """In float64 before the captured precision, small before the captured shapes."""
    for sized in [_shrunk(use), use] if _num_elements(use) > MANY_ELEMENTS else [use]:
        if _num_elements(sized) <= TOO_MANY_ELEMENTS:
            yield _with_shapes(sized, _in_float64)
            yield sized


def _num_elements(use: Application) -> int:
    return sum(shape.numel for shape in use.shapes)


def _with_shapes(use: Application, change: Callable[[Shape], Shape]) -> Application:
    return replace(use, args=pytree.tree_map_only(Shape, change, use.args))


def _in_float64(shape: Shape) -> Shape:
    return replace(shape, dtype=torch.float64) if shape.dtype.is_floating_point else shape


def _shrunk(use: Application) -> Application:
    """Leading dims cut down, equal ones alike; sizes that are the last of some matrix stay."""
    kept = {shape.sizes[-1] for shape in use.shapes if len(shape.sizes) > 1}
    leading = dict.fromkeys(size for shape in use.shapes for size in shape.sizes[:-1] if size not in kept)
    small = {size: min(size, 2 + position) for position, size in enumerate(leading)}
    return _with_shapes(use, lambda shape: replace(shape, sizes=tuple(small.get(n, n) for n in shape.sizes)))


# ---- one comparison

def _agree(use: Application, sample: Sample) -> tuple[bool | None, torch.dtype]:
    """Whether both gradients are equal on one draw of values, None where nothing finite is left to compare; and the
    coarsest dtype that was met on the way."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _LowestPrecision() as seen:
        warnings.simplefilter("ignore")
        own = _gradients(use, use.function.apply, sample)
        derived = _gradients(use, lambda *args: _forward(use.function, args), sample)
    tolerance = sample.tolerance if seen.dtype == torch.float64 else COARSE.get(seen.dtype, 0.5)
    compared = None
    for a, b in zip(own, derived, strict=True):
        finite = torch.isfinite(a) & torch.isfinite(b)
        a, b = a[finite], b[finite]
        if not a.numel():
            continue
        compared = True
        rounding = NOTHING * sample.gradient * a.numel() ** 0.5
        size = max(a.norm().item(), b.norm().item(), rounding)
        if (a - b).norm().item() > tolerance * size:
            return False, seen.dtype
    return compared, seen.dtype


def _gradients(use: Application, run: Callable[..., Any], sample: Sample) -> list[Tensor]:
    """By each tensor that asks for one, with random gradients of the outputs; zeros where none arrives."""
    torch.manual_seed(0)
    leaves: list[Tensor] = []

    def tensor(shape: Shape) -> Tensor:
        if not _has_gradient(shape.dtype):
            return torch.randint(2, shape.sizes).to(shape.dtype)
        value = torch.randn(shape.sizes, dtype=torch.float64).mul(sample.deviation)
        value = (value.abs() + sample.mean if sample.mean else value).to(shape.dtype)
        if not shape.requires_grad:
            return value
        leaves.append(value.requires_grad_())
        return value.clone()  # the Function may write into it

    with torch.enable_grad():
        outputs = pytree.tree_leaves(run(*pytree.tree_map_only(Shape, tensor, use.args)))
    reached = [o for o in outputs if isinstance(o, Tensor) and _has_gradient(o.dtype)]
    arriving = [torch.randn(o.shape, dtype=torch.float64).mul(sample.gradient).to(o.dtype) for o in reached]
    pairs = [(o, g) for o, g in zip(reached, arriving, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True))


def _forward(function: type[Function], args: tuple[Any, ...]) -> Any:
    if function.setup_context is not Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(args), *args)


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Context:
    """In the place of ``ctx`` where a forward runs by itself: takes whatever is stored and does nothing with it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


class _LowestPrecision(TorchDispatchMode):
    """Notes the coarsest dtype that ops compute in, so that float32 inside of a Function is not held to float64."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and _has_gradient(value.dtype):
                self.dtype = max(self.dtype, value.dtype.to_real(), key=lambda dtype: torch.finfo(dtype).eps)
        return result
