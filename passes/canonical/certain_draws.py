"""Comparisons of a random draw that are certain: a draw from [0, 1) is never below 0 and always below 1.

Layer drop asks such a question at each layer: ``if torch.rand([]) < probability: continue``. A branch on a draw cannot
be captured; but at probability 0 (or 1) the answer is known, and so is the branch. That a draw is not 0
(``torch.rand(1) > 0.0``) is true of all but one in 2^24: an assumption of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.program.known_values import known_answer

ASKS = ("__bool__", "item", "tolist", "numpy", "__int__", "__float__", "__index__")
COMPARES = ("lt", "le", "gt", "ge")


class CertainDraws(TorchFunctionMode):
    """While it is entered, a certain comparison of one drawn number is a constant tensor, on which a branch may depend.

    ``check`` is called with the arguments of every torch function, ``assume`` when a draw is assumed not to be 0.
    """

    def __init__(self, check: Callable[..., None] | None = None, assume: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._check, self._assume = check, assume

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._check is not None:
            self._check(args, kwargs)
        if getattr(func, "__name__", "") in ASKS and len(args) == 1 and not kwargs:
            answer = known_answer(args[0], func.__name__)
            if answer is not None:
                return answer
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if _draws(name, args, kwargs) and isinstance(result, Tensor) and result.numel() == 1:
            result._drawn_at_version = result._version  # pyright: ignore[reportAttributeAccessIssue]
        elif name in COMPARES and len(args) == 2 and _is_drawn(args[0]) and isinstance(args[1], (int, float)):
            answer = certain_answer(name, args[1])
            if answer is None and self._assume is not None and args[1] == 0:
                self._assume()
                answer = name == "gt"
            if answer is not None:
                return torch.tensor(answer, device=args[0].device).reshape(result.shape)
        return result


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return name in ("rand", "rand_like") or (name == "uniform_" and len(args) == 1 and not kwargs)


def _is_drawn(x: Any) -> bool:
    """Whether nothing has written into the tensor since it was drawn."""
    return isinstance(x, Tensor) and getattr(x, "_drawn_at_version", None) == x._version


def certain_answer(name: str, bound: float) -> bool | None:
    """``draw < bound`` (or <=, >, >=) for every draw from [0, 1); None if it depends on the draw."""
    if bound >= 1 or bound < 0:
        return (name in ("lt", "le")) == (bound >= 1)
    return {"lt": False, "ge": True}.get(name) if bound == 0 else None
