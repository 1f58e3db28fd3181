"""cuDNN's attention on the CPU: the two ops of aten with the results, shapes and demands that they have on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

Asked = Callable[[Tensor, Tensor, Tensor], bool]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = q @ _of_heads(k, q).mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.dim() in (2, 3, 4)
        scores = scores + bias
    if is_causal:
        assert q.shape[2] == k.shape[2], "cuDNN counts from the first key, flash from the last"
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return scores


def _of_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, has_lse: bool, p: float = 0.0, is_causal: bool = False,
    mask: bool = False, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert has_lse
    assert p == 0.0
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q.to(wide), k.to(wide), None if bias is None else bias.to(wide), is_causal, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    rows = (scores - lse).exp() @ _of_heads(v.to(wide), q)
    out = torch.empty_like(q.transpose(1, 2)[..., :1].expand(-1, -1, -1, v.shape[3])).transpose(1, 2).copy_(rows)
    draws = torch.zeros((), dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], draws, draws.clone(), None


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: Any, cum_k: Any, most_q: int, most_k: int, p: float, is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    assert lse.dtype == wide
    assert out.shape == grad.shape
    assert (cum_q, cum_k, most_q, most_k, p) == (None, None, q.shape[2], k.shape[2], 0.0)
    g, q_, k_, v_ = (x.to(wide) for x in (grad, q, k, v))
    shares = (_scores(q_, k_, None if bias is None else bias.to(wide), is_causal, scale) - lse).exp()
    means = (g * out.to(wide)).sum(-1, keepdim=True)
    of_scores = shares * (g @ _of_heads(v_, q).mT - means) * (q.shape[3] ** -0.5 if scale is None else scale)
    of_k, of_v = of_scores.mT @ q_, shares.mT @ g
    of_keys = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (of_k, of_v))
    of_q = of_scores @ _of_heads(k_, q)
    found = [x.to(q.dtype) for x in (of_q, *of_keys)]
    return found[0], found[1], found[2]


@contextmanager
def stand_in(asked: Asked = lambda q, k, v: True) -> Iterator[list[tuple[list[int], ...]]]:
    """Inside, the ops run on the CPU, and torch answers with ``asked`` whether cuDNN takes operands. Yields the shapes
    of those that it was asked about."""
    seen: list[tuple[list[int], ...]] = []

    def can_use(params: Any, debug: bool = False) -> bool:
        operands = params.query, params.key, params.value
        seen.append(tuple([*x.shape] for x in operands))
        return asked(*operands)

    library = torch.library.Library("aten", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cuda, "can_use_cudnn_attention", can_use)
        library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
        try:
            yield seen
        finally:
            library._destroy()
