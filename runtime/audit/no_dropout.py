"""Dropout as the identity, in a module that stays in training mode.

``model.eval()`` would turn off more than dropout: other branches, norms and losses ask for the mode too.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
_MULTI_HEAD = [*inspect.signature(F.multi_head_attention_forward).parameters]
_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: _MULTI_HEAD.index("dropout_p")}


class NoDropout(TorchFunctionMode):
    """Inside, each dropout gives back its input, and attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        place = _PLACES.get(func)
        if place is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in given:
                given["dropout_p"] = 0.0
        return func(*args, **given)
