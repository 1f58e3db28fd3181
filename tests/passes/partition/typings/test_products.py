"""Rules of products, attention, embedding and loss: every admitted typing against the op on whole tensors."""

import pytest
import torch
from hypothesis import strategies as st

from tests.tools.random_ops import Weight, check_options, op_of, real, rule_property, sizes

pytestmark = pytest.mark.check

aten = torch.ops.aten


def weight(draw, tensor):
    return Weight(tensor) if draw(st.booleans()) else tensor


@rule_property
def test_linear(data):
    *batch, n, m = sizes(data.draw, data.draw(st.integers(2, 4)))
    check_options(data, op_of(aten.linear.default, (real(*batch, n), weight(data.draw, real(m, n)))))


@rule_property
def test_mm_and_bmm(data):
    b, n, k, m = sizes(data.draw, 4)
    if data.draw(st.booleans()):
        check_options(data, op_of(aten.mm.default, (real(n, k), weight(data.draw, real(k, m)))))
    else:
        check_options(data, op_of(aten.bmm.default, (real(b, n, k), real(b, k, m))))


@rule_property
def test_matmul_with_broadcast_batches(data):
    batch = sizes(data.draw, data.draw(st.integers(0, 2)))
    n, k, m = sizes(data.draw, 3)
    left, right = (
        [b if data.draw(st.booleans()) else 1 for b in batch][data.draw(st.integers(0, len(batch))) :] for _ in range(2)
    )
    a = real(*left, n, k) if left or data.draw(st.booleans()) else real(k)
    b = real(*right, k, m) if right or data.draw(st.booleans()) else real(k)
    check_options(data, op_of(aten.matmul.default, (a, weight(data.draw, b))))


EQUATIONS = [
    "a,b->ab",
    "bij,bjk->bik",
    "bsh,hnd->bsnd",
    "bhqd,bhkd->bhqk",
    "bhqk,bhkd->bqhd",
    "bsnd,ndh->bsh",
    "bsh,xhnd->xbnsd",
    "i,j->ij",
    "bij->bji",
    "bij->bi",
    "bi,bi->b",
    "ab,bc,cd->ad",
    "bsi,i->bs",
    "bii->bi",
    "bs,bs->",
    "ab,ab->ab",
    "bsgrd,btgd->bgrst",
]


@rule_property
def test_einsum(data):
    text = data.draw(st.sampled_from(EQUATIONS))
    letters = sorted(set(text) - set(",->"))
    size = dict(zip(letters, sizes(data.draw, len(letters)), strict=True))
    operands = [real(*(size[c] for c in word)) for word in text.partition("->")[0].split(",")]
    operands[-1] = weight(data.draw, operands[-1])
    check_options(data, op_of(aten.einsum.default, (text, operands)))


@rule_property
def test_attention_by_heads(data):
    groups, times = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.sampled_from([1, 2, 4]))
    b, s, d, h = 2, data.draw(st.sampled_from([1, 3])), 2, groups * times
    t = s if data.draw(st.booleans()) else 4
    q, k, v = real(b, h, s, d), real(b, groups, t, d), real(b, groups, t, 3)
    masks = [
        None,
        torch.rand(b, 1, s, t) > 0.3,
        real(1, h, s, t),
        real(s, t),
        real(b, 1, s, t, grad=False),
        real(h, s, t),
    ]
    mask = data.draw(st.sampled_from(masks))
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    causal = mask is None and data.draw(st.booleans())
    kwargs = {"scale": 0.7} if data.draw(st.booleans()) else {}
    kwargs |= {"enable_gqa": True} if times > 1 else {}
    check_options(data, op_of(aten.scaled_dot_product_attention.default, (q, k, v, mask, 0.0, causal), kwargs))


@rule_property
def test_embedding(data):
    rows, columns = data.draw(st.sampled_from([3, 8, 12, 70, 100])), data.draw(st.sampled_from([1, 3, 4, 6, 8]))
    shape = sizes(data.draw, data.draw(st.integers(0, 2)))
    ids = torch.randint(rows, shape)
    more = data.draw(st.sampled_from([(), (-1,), (rows - 1,), (0,)]))
    check_options(data, op_of(aten.embedding.default, (weight(data.draw, real(rows, columns)), ids, *more)))


@rule_property
def test_cross_entropy_over_a_cut_vocabulary(data):
    n, classes = data.draw(st.sampled_from([1, 4, 5])), data.draw(st.sampled_from([2, 4, 12, 70, 100]))
    ignored = data.draw(st.sampled_from([-100, 1, -1]))
    target = torch.randint(classes, (n,))
    target[torch.rand(n) < 0.3] = ignored
    target[0] = classes - 1 if classes - 1 != ignored else 0
    smoothing = data.draw(st.sampled_from([0.0, 0.1]))
    weights = real(classes, grad=False).abs() if data.draw(st.integers(0, 3)) == 0 else None
    args = (real(n, classes), target, weights, data.draw(st.integers(0, 2)), ignored, smoothing)
    check_options(data, op_of(aten.cross_entropy_loss.default, args))


@rule_property
def test_cross_entropy_of_other_forms_is_computed_whole(data):
    form = data.draw(st.integers(0, 2))
    if form == 0:
        logits, target = real(4, 8), torch.rand(4, 8, dtype=torch.float64)
    elif form == 1:
        logits, target = real(2, 8, 6), torch.randint(8, (2, 6))
    else:
        logits, target = real(8), torch.tensor(3)
    check_options(data, op_of(aten.cross_entropy_loss.default, (logits, target)))
