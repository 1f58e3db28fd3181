"""Random ops that draw from a stream that is named; the default generator stays as it was.

stream = hash(seed, step, global microbatch, which op, and where each rank draws its own: the tp rank)
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F

from passes.ops.attention import attention_arguments, shared_key_attention
from passes.ops.random_state import RandomState

Tensor = torch.Tensor


def stream_seed(random: RandomState, op: int, sharded: bool) -> int:
    """The seed of one draw: 63 bits of a hash of all that names it."""
    text = f"{random.seed}/{random.step}/{random.microbatch}/{op}/{random.tp_rank if sharded else -1}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream_dropout(x: Tensor, p: float, random: RandomState, op: int, sharded: bool) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1/(1 − p); x itself in an evaluation."""
    if not random.training:
        return x
    generator = torch.Generator(x.device).manual_seed(stream_seed(random, op, sharded))
    keep = torch.empty_like(x, requires_grad=False).bernoulli_(1.0 - p, generator=generator)
    return x * keep.div_(1.0 - p) if p < 1.0 else x * keep


def stream_attention(target: Any, random: RandomState, op: int, sharded: bool, args: Any, kwargs: Any) -> Tensor:
    """Attention whose dropout draws from the named stream; the default generator is left as it was."""
    device = args[0].device
    off = {} if random.training else {"dropout_p": 0.0}
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(stream_seed(random, op, sharded))
        if target is shared_key_attention:
            return shared_key_attention(*args, **{**kwargs, **off})
        given: dict[str, Any] = attention_arguments(args, kwargs) | off
        return F.scaled_dot_product_attention(*args[:3], attn_mask=given.pop("mask", None), **given)


def stream_random(target: Any, random: RandomState, op: int, sharded: bool, args: Any, kwargs: Any) -> Any:
    """Any other random op, such as the draw of a drop path; the default generator is left as it was."""
    devices = {v.device for v in (*args, *kwargs.values()) if isinstance(v, Tensor)}
    devices |= {v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"], device_type="cuda"):
        torch.manual_seed(stream_seed(random, op, sharded))
        return target(*args, **kwargs)
