"""A user's Function with a backward of its own, as the target of one call in the graph.

    y, .. = OwnBackward(x, ..)        runs Function.apply on a rank's tensors, so the backward is the user's own code

Its type over tp follows from trials of its backward B on numbers (planner.capture.gradients.trials):

    I    always: the arriving gradients are complete
    R    if B is linear, B(Σ g) = Σ B(g): the arriving gradients are partial sums
    V    along a dim over which forward and backward work part by part

torch.export records it as one call of an op of PyTorch's dispatcher, so that every step of an export can handle it:

    meshwright::own_backward(Tensor[] tensors, str key) -> Tensor[]

``key`` finds the OwnBackward while a model is captured (``calls_recorded``), and is the same when the model is exported
again. Canonical form replaces the op by the OwnBackward itself, without the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import Function
from torch.utils import _pytree as pytree

_CALLS: dict[str, OwnBackward] = {}
_LIBRARY = torch.library.Library("meshwright", "DEF")
_LIBRARY.define("own_backward(Tensor[] tensors, str key) -> Tensor[]")


@dataclass(frozen=True)
class Cut:
    """All outputs can be sharded along ``dim`` if each input is sharded along its own (None: it is read in full)."""

    dim: int
    inputs: tuple[int | None, ...]


@dataclass(frozen=True)
class Facts:
    """The facts that trials showed of a Function; the defaults claim nothing.

    ``reached``: for each tensor argument whether the backward gives it a gradient.
    """

    reached: tuple[bool, ...]
    linear: bool = False
    cuts: tuple[Cut, ...] = ()
    draws: bool = False  # random numbers in its forward
    tried: bool = True
    in_order: bool = False  # its tensors must lie in memory in the order of their dims


@dataclass(frozen=True)
class Operand:
    """Replaces a tensor among the arguments."""

    position: int


@dataclass(frozen=True)
class Output:
    """A tensor that the Function returns."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def empty(self) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Autocast:
    """The mode in which the forward runs."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device}:{str(self.dtype).removeprefix('torch.')}"

    def entered(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype)


@dataclass(frozen=True)
class OwnBackward:
    """Equal if Function and arguments are; ``label`` identifies them, and is the same in every process.

    ``args``: with Operands in the place of tensors. ``outputs``: the result of apply, with Outputs in their place.
    """

    function: type[Function]
    args: tuple[Any, ...] = field(compare=False)
    outputs: Any = field(compare=False)
    facts: Facts = field(compare=False)
    label: str
    autocast: Autocast | None = field(default=None, compare=False)
    key: str = field(default="", compare=False)  # while a model is captured (passes.program.ops.own_backward)
    __name__: str = field(default="", init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.function.__name__)  # in the code of a graph, and in messages

    def __call__(self, *tensors: Tensor) -> Any:
        given = [x.contiguous() for x in tensors] if self.facts.in_order else tensors
        args = pytree.tree_map_only(Operand, lambda o: given[o.position], self.args)
        with self.autocast.entered() if self.autocast else nullcontext():
            made = [x for x in pytree.tree_leaves(self.function.apply(*args)) if isinstance(x, Tensor)]
        return made[0] if len(made) == 1 else tuple(made)

    @property
    def made(self) -> list[Output]:
        return [leaf for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, Output)]

    def returned(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure that apply returns, with these tensors."""
        rest = iter(tensors)
        return pytree.tree_map_only(Output, lambda _: next(rest), self.outputs)

    @property
    def tags(self) -> tuple[Any, ...]:
        """As ops of PyTorch have them."""
        return (torch.Tag.nondeterministic_seeded,) if self.facts.draws else ()

    def __str__(self) -> str:
        return self.label

    __repr__ = __str__


def adds_up(node: fx.Node) -> bool:
    """Return whether the gradients of partial sums are partial sums, as for every derivative."""
    return not isinstance(node.target, OwnBackward) or node.target.facts.linear


@contextmanager
def calls_recorded() -> Iterator[None]:
    """Calls recorded within live as long as this."""
    before = dict(_CALLS)
    try:
        yield
    finally:
        _CALLS.clear()
        _CALLS.update(before)


def record(call: OwnBackward, tensors: list[Tensor]) -> Any:
    """Return the results of ``call``, as one call of the graph under export."""
    _CALLS[call.key] = call
    return call.returned(OWN_BACKWARD(tensors, call.key))


def recorded(key: str) -> OwnBackward:
    return _CALLS[key]


def _outputs(tensors: list[Tensor], key: str) -> list[Tensor]:
    return [output.empty() for output in _CALLS[key].made]


class GradientAsked(Exception):
    """The forward itself asks for a gradient through a Function with a backward of its own."""


def _refuse(context: Any, *gradients: Any) -> Any:
    raise GradientAsked(f"the forward computes a gradient through {context.name}, which has a backward of its own")


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name = _CALLS[inputs[1]].__name__


torch.library.register_fake("meshwright::own_backward", _outputs, lib=_LIBRARY)
torch.library.impl("meshwright::own_backward", "CompositeExplicitAutograd", _outputs, lib=_LIBRARY)
torch.library.register_autograd("meshwright::own_backward", _refuse, setup_context=_remember, lib=_LIBRARY)
OWN_BACKWARD: Any = torch.ops.meshwright.own_backward.default
