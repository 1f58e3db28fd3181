"""What a forward did, call by call, with the tensors of each call by their origin.

calls[3] = Recorded(aten.linear, (Operand(2), Operand("parameter head.weight")), …)      and values[3]: its shape
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a forward. ``origin``: the number of the call that gave it, or its name; ``item``: of a tuple."""

    origin: int | str
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call: ``args`` and ``kwargs`` with an Operand for each tensor. ``state``: modes that it ran under."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: tuple[Any, ...]


@dataclass
class Recording:
    """``held``: tensors that no call gave, by name. ``values``: of calls, without memory. ``output``: the leaves."""

    mode: FakeTensorMode
    held: dict[str, Tensor]
    calls: list[Recorded] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)

    def value(self, operand: Operand) -> Any:
        """Shape and dtype of an operand, as a tensor without memory."""
        if isinstance(operand.origin, str):
            return self._of_held(self.held[operand.origin])
        value = self.values[operand.origin]
        return value if operand.item is None else value[operand.item]

    def _of_held(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return self.mode.from_tensor(tensor)
        found: Any = proxy_tensor.extract_val(tensor)
        return found.requires_grad_(tensor.requires_grad)

    def named(self) -> dict[str, Operand]:
        """Name → operand of each held tensor: one tensor may have several names."""
        first: dict[int, Operand] = {}
        return {name: first.setdefault(id(tensor), Operand(name)) for name, tensor in self.held.items()}

    def forget_values(self) -> None:
        """Keep the calls, and of the held tensors the constants."""
        self.values.clear()
        self.held = {name: tensor for name, tensor in self.held.items() if is_constant(name)}


def parameter(fqn: str) -> str:
    """The name of a parameter's or buffer's operand."""
    return f"parameter {fqn}"


def batch_tensor(key: str) -> str:
    """The name of an input's operand."""
    return f"input {key}"


def constant(number: int) -> str:
    """The name of the operand of a tensor that the forward itself brought along."""
    return f"constant {number}"


def is_constant(name: str) -> bool:
    return name.startswith("constant ")
