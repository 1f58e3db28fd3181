"""Parameters that a forward freezes and unfreezes again, as peft does for the time of ``disable_adapter()``.

A graph knows one ``requires_grad`` of each parameter. If none of those that are frozen meanwhile is read meanwhile, and
all are trained again at the end, the graph is what the forward computes; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.errors import Where

_ATTRIBUTES = ("__get__", "__set__", "requires_grad_")


class FrozenMeanwhile(TorchFunctionMode):
    """Owns the parameters that are changed now, with their own ``requires_grad`` and the line that changed them."""

    def __init__(self, refuse: Callable[[Where], NoReturn]) -> None:
        super().__init__()
        self._changed: dict[int, tuple[Tensor, bool, Where]] = {}
        self._refuse = refuse

    def note(self, parameter: Tensor, value: bool, where: Callable[[], Where]) -> None:
        """A change of ``requires_grad`` to ``value``, or back."""
        if id(parameter) in self._changed and self._changed[id(parameter)][1] == value:
            del self._changed[id(parameter)]
        elif parameter.requires_grad != value:
            self._changed[id(parameter)] = parameter, parameter.requires_grad, where()

    def refuse_changed(self) -> None:
        """Raise PlanError if a parameter is not as before."""
        for _, _, where in self._changed.values():
            self._refuse(where)

    def restore(self) -> None:
        changed, self._changed = list(self._changed.values()), {}
        for parameter, before, _ in changed:
            parameter.requires_grad_(before)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._changed and getattr(func, "__name__", "") not in _ATTRIBUTES:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._changed and self._changed[id(leaf)][1]:
                    self._refuse(self._changed[id(leaf)][2])
        return func(*args, **(kwargs or {}))
