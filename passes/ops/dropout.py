"""Random ops that leave the default generator unchanged: they draw from a named stream (passes.ops.random_state), or
their numbers themselves are named, so that every layout, replay and rerun finds the same for the same element.

    number = mix(mix(key(seed, site) + step · G₁ + sample · G₂) + element · G)        64 bits
    mix(z) = z ⊕ z≫30, · M₁, ⊕ ≫27, · M₂, ⊕ ≫31                                      the finalizer of SplitMix64

(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", variant 13 of the constants.) ``element``
counts the elements of one sequence in the full value, ``sample`` the sequences of the global batch. int64 wraps around,
so the bits are those of unsigned arithmetic, on a CPU and on a GPU alike.

    dropout    y = x · keep · 1/(1 − p)      keep with probability 1 − p, one byte an element; the factor in float32

In bfloat16 the factor of p = 0.1 is 1.109375 for 1.1111: multiplied into the mask, it makes every output 0.16 % small.
"""

import hashlib
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.attention import (
    attention_arguments,
    causal_attention,
    shared_key_attention,
    shared_key_causal_attention,
)
from passes.ops.random_state import RandomState

aten = torch.ops.aten
OWN_ATTENTION = (shared_key_attention, causal_attention, shared_key_causal_attention)  # their dropout is a keyword
_BY_NAME = {function.__name__: function for function in OWN_ATTENTION}
Ranges = tuple[tuple[int, int], ...]


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


GOLDEN = _signed(0x9E3779B97F4A7C15)
STEP, SAMPLE = _signed(0xD1B54A32D192ED03), _signed(0xABC98388FB8FAC03)
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


class SampleElements(NamedTuple):
    """Which elements a rank has of a value of ``shape`` (a full microbatch): of each dim ``ranges``, in its order.

    ``batch``: (dim, step, number) of the sequences; ``by_sample``: whether sequences have numbers of their own.
    """

    site: int
    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    batch: tuple[int, int, int] | None
    by_sample: bool


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
    """Return x · keep / (1 − p)."""
    return _Dropout.apply(x, keep, 1.0 / (1.0 - p) if p < 1.0 else 1.0)


def stream_attention(target: Any, random: RandomState, op: int, sharded: bool, args: Any, kwargs: Any) -> Tensor:
    """Call attention with dropout that draws from the named stream; the default generator is unchanged.

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
    """Call any other random op, such as the draw of a drop path; the default generator is unchanged."""
    given = (*args, *kwargs.values())
    devices = [v.device for v in given if isinstance(v, Tensor)] + [v for v in given if isinstance(v, torch.device)]
    with random.as_default(devices[0] if devices else torch.device("cpu"), op, sharded):
        return target(*args, **kwargs)


def counted_dropout(x: Tensor, p: float, random: RandomState, place: SampleElements) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1/(1 − p); x itself in an evaluation."""
    if not random.training:
        return x
    keep = _shifted(numbers(random, place, x.device), 11) >= int(p * (1 << 53))
    return scaled_dropout(x, keep.expand(x.shape), p)


def row_names(random: RandomState, place: SampleElements, device: torch.device) -> Tensor:
    """Return [tokens, 2]: the sample of each token that a rank has of a microbatch, and its place there. ``place``: of
    the dims of tokens alone."""
    sample, at = torch.broadcast_tensors(*_names(place, random.counter(device)[1], device))
    return torch.stack([sample.reshape(-1), at.reshape(-1)], 1)


def dropout_of_rows(x: Tensor, p: float, random: RandomState, place: SampleElements, names: Tensor) -> Tensor:
    """Return the same of rows [.., rows, features..] of named tokens: each element as in the full value. ``place``: of
    the dims of features alone."""
    if not random.training:
        return x
    sample, at = names.reshape(-1, 2, *[1] * len(place.shape)).unbind(1)
    _, feature = _names(place, at, x.device)
    key = _key(random, place, x.device)
    drawn = mix(mix(key + sample * SAMPLE) + (at * math.prod(place.shape) + feature) * GOLDEN)
    return scaled_dropout(x, (_shifted(drawn, 11) >= int(p * (1 << 53))).view(x.shape), p)


def counted_bernoulli(p: float | Tensor, random: RandomState, place: SampleElements, like: Tensor) -> Tensor:
    """Return ones with probability ``p``, in the dtype of ``like``."""
    drawn = counted_uniform(random, place, torch.float64, like.device)
    return (drawn < p).to(like.dtype)


def counted_uniform(random: RandomState, place: SampleElements, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers in [0, 1), with as many bits as the dtype holds."""
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return (_shifted(numbers(random, place, device), 64 - bits).to(torch.float64) * 2.0**-bits).to(dtype)


def counted_normal(random: RandomState, place: SampleElements, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normal numbers by Box and Muller: √(−2 ln u) cos 2πv of two uniform numbers, computed in float64."""
    first = numbers(random, place, device)
    u, v = ((_shifted(z, 11).to(torch.float64) + 0.5) * 2.0**-53 for z in (first, mix(first + GOLDEN)))
    return ((-2.0 * u.log()).sqrt() * (2.0 * math.pi * v).cos()).to(dtype)


def numbers(random: RandomState, place: SampleElements, device: torch.device) -> Tensor:
    """Return 64 bits for each element that a rank has of a value."""
    sample, element = _names(place, random.counter(device)[1], device)
    return mix(mix(_key(random, place, device) + sample * SAMPLE) + element * GOLDEN)


def _key(random: RandomState, place: SampleElements, device: torch.device) -> Tensor:
    """Return the key of all draws of one op in a step."""
    return _key_of(f"{random.seed}/{place.site}", random.counter(device)[0])


def _key_of(name: str, step: Tensor) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return step * STEP + int.from_bytes(digest, "little", signed=True)


def mix(z: Tensor) -> Tensor:
    """Return a one-to-one function of 64 bits: every output bit depends on every input bit."""
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _names(place: SampleElements, microbatch: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sample and element of each place, in shapes that together make that of the value."""
    dim, step, number = place.batch or (-1, 1, 1)
    sizes = [n // number if d == dim else n for d, n in enumerate(place.shape)]
    sample = microbatch * number if place.by_sample else microbatch * 0
    element = torch.zeros([1] * len(sizes), dtype=torch.int64, device=device)
    for d, ranges in enumerate(place.ranges):
        at = torch.cat([torch.arange(a, b, device=device) for a, b in ranges])
        at = at.reshape([-1 if i == d else 1 for i in range(len(sizes))])
        if d == dim:
            sample = sample + at // step % number
            at = at // (step * number) * step + at % step
        element = element + at * math.prod(sizes[d + 1 :])
    return sample, element


def uniform_of(seed: int, name: str, step: Tensor, sample: Tensor, element: Tensor) -> Tensor:
    """Return numbers in (0, 1), float64 with 52 bits, of each (step, sample, element), which give the shape."""
    z = mix(mix(_key_of(f"{seed}/{name}", step) + sample * SAMPLE) + element * GOLDEN)
    return (_shifted(z, 12).to(torch.float64) + 0.5) * 2.0**-52
