"""All documents in one call of a kernel for segments: attention of the mask, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops import document_blocks, documents
from passes.ops.document_blocks import CAUSAL, WHOLE, Band, blocks_of, runs_of
from passes.ops.documents import attention_by_documents
from tests.passes.ops.test_documents import GROUPS, HEADS, LENGTH, MASKS, OTHERS, drawn, operands, same

BANDS = {"whole": WHOLE, "window": Band(2, 0), "both sides": Band(2, 2), "rows of windows": Band(4, 0)}
IN_ONE = dict.fromkeys(("causal", *BANDS, "one sequence", "two dims", "addends", "infinite"), 5)
IN_ONE["some rows"] = 2  # a document that has rows before and after a gap needs its mask


def by_loop(band: Band) -> Callable[..., Tensor]:
    """What the kernel's documentation says, in float64 and on a CPU."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *ends: Any, scale: float | None) -> Tensor:
        rows, keys, most_rows, most_keys = ends
        assert rows.dtype == keys.dtype == torch.int32
        assert (most_rows, most_keys) == (int(rows.diff().max()), int(keys.diff().max()))
        found = []
        for (a, b), (c, d) in zip(rows.unfold(0, 2, 1).tolist(), keys.unfold(0, 2, 1).tolist(), strict=True):
            given = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            stands, last = (d - c) - (b - a), max(b - a, d - c)
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(stands + (last if band.right < 0 else band.right))
            mask = mask.triu(stands - (last if band.left < 0 else band.left))
            y = F.scaled_dot_product_attention(*given, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            found.append(y[0].transpose(0, 1))
        return torch.cat(found)

    return attention


def check(mask: Tensor, found: list[Tensor], wanted: list[Tensor], limit: float) -> None:
    """Both leaves; ``wanted`` in float64."""
    options: dict[str, Any] = {"scale": 0.3, "enable_gqa": found[0].shape[1] != found[1].shape[1]}
    ours = attention_by_documents(*found, mask, 6, **options)
    seen = mask if mask.dtype == torch.bool else mask.double()
    truth = F.scaled_dot_product_attention(*wanted, seen, **options)
    weight = torch.randn(truth.shape, dtype=truth.dtype, device=truth.device)
    (ours * weight.to(ours.dtype)).sum().backward()
    (truth * weight.to(ours.dtype).double()).sum().backward()
    pairs = [(ours, truth), *((a.grad, b.grad) for a, b in zip(found, wanted, strict=True))]
    for a, b in pairs:
        assert a is not None
        assert b is not None
        assert (a.double() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("name", [*MASKS, *OTHERS])
def test_segments_are_the_attention_of_the_mask(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Band] = []

    def kernel(band: Band) -> Callable[..., Tensor]:
        calls.append(band)
        return by_loop(band)

    monkeypatch.setattr(document_blocks, "kernel", kernel)
    monkeypatch.setattr(documents, "has_kernel", lambda *given: True)
    for seed in range(5):
        mask = (MASKS | OTHERS)[name](seed)
        check(mask, operands(mask, seed, groups), operands(mask, seed, groups), 1e-12)
    assert len(calls) == IN_ONE.get(name, 0)
    assert set(calls) <= {BANDS.get(name, CAUSAL)}


def test_keys_in_their_order_are_not_copied() -> None:
    ids = drawn(1)
    cpu = torch.device("cpu")
    whole = document_blocks.segments_of(blocks_of(runs_of(same(ids))), 2, LENGTH, cpu)
    some = document_blocks.segments_of(blocks_of(runs_of(same(ids)[:, :, LENGTH // 2 :])), 2, LENGTH, cpu)
    assert whole is not None
    assert whole.places is None
    assert some is not None
    assert some.places is not None


# of rows without keys PyTorch's own kernels differ: cuDNN's are zero, others the mean of all values
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("name", [*MASKS, "a bias", "of heads", "noise"])
def test_on_a_gpu(name: str, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    in_one = documents.attention_of_segments
    monkeypatch.setattr(documents, "attention_of_segments", lambda *given: calls.append(given) or in_one(*given))
    for seed in range(5):
        mask = (MASKS | OTHERS)[name](seed).cuda()
        given = operands(mask, seed, groups)
        found = [x.detach().to("cuda", dtype).requires_grad_() for x in given]
        wanted = [x.detach().double().requires_grad_() for x in found]
        if mask.dtype != torch.bool:
            mask = mask.clamp(min=torch.finfo(dtype).min).to(dtype)
        check(mask, found, wanted, 2e-2)
    assert len(calls) == IN_ONE.get(name, 0)
