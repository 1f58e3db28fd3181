"""Random ops that draw from a stream that is named (passes.ops.random_state); the default generator is unchanged.

dropout    y = x · keep · 1/(1 − p)      keep drawn with probability 1 − p, one byte an element; the factor in float32

In bfloat16 the factor of p = 0.1 is 1.109375 for 1.1111: multiplied into the mask, it makes every output 0.16 % small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from passes.ops.attention import attention_arguments, shared_key_attention
from passes.ops.causal_attention import causal_attention, shared_key_causal_attention
from passes.ops.random_state import RandomState

Tensor = torch.Tensor
aten = torch.ops.aten
OWN_ATTENTION = (shared_key_attention, causal_attention, shared_key_causal_attention)  # their dropout is a keyword
_BY_NAME = {function.__name__: function for function in OWN_ATTENTION}


class _Dropout(torch.autograd.Function):
    """Both ways the op that PyTorch's own dropout has for its backward: one kernel, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(keep)
        return aten.native_dropout_backward(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (keep,) = ctx.saved_tensors
        return aten.native_dropout_backward(grads[0], keep, ctx.scale), None, None


def stream_dropout(x: Tensor, p: float, random: RandomState, op: int, sharded: bool) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1/(1 − p); x itself in an evaluation."""
    if not random.training:
        return x
    keep = torch.empty_like(x, dtype=torch.bool, requires_grad=False)
    keep.bernoulli_(1.0 - p, generator=random.generator(x.device, op, sharded))
    return scaled_dropout(x, keep, p)


def scaled_dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x · keep / (1 − p)."""
    return _Dropout.apply(x, keep, 1.0 / (1.0 - p) if p < 1.0 else 1.0)


def stream_attention(target: Any, random: RandomState, op: int, sharded: bool, args: Any, kwargs: Any) -> Tensor:
    """Attention with dropout that draws from the named stream; the default generator is unchanged.

    ``target``: aten's op, or the name of one of ``OWN_ATTENTION``: code that is generated cannot hold the function.
    """
    if not random.training:
        return _attention(target, args, kwargs, {"dropout_p": 0.0})
    with random.as_default(args[0].device, op, sharded):
        return _attention(target, args, kwargs, {})


def _attention(target: Any, args: Any, kwargs: Any, changes: dict[str, Any]) -> Tensor:
    if target in _BY_NAME:
        return _BY_NAME[target](*args, **{**kwargs, **changes})
    given: dict[str, Any] = attention_arguments(args, kwargs) | changes
    return F.scaled_dot_product_attention(*args[:3], attn_mask=given.pop("mask", None), **given)


def stream_random(target: Any, random: RandomState, op: int, sharded: bool, args: Any, kwargs: Any) -> Any:
    """Any other random op, such as the draw of a drop path; the default generator is unchanged."""
    given = (*args, *kwargs.values())
    devices = [v.device for v in given if isinstance(v, Tensor)] + [v for v in given if isinstance(v, torch.device)]
    with random.as_default(devices[0] if devices else torch.device("cpu"), op, sharded):
        return target(*args, **kwargs)
