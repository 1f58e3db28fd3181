"""Products and losses in one spelling each; every case computes what the model does."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from passes.rules.products import explicit
from tests.models.one_body import OneBody
from tests.tools.canonical import canonical, canonical_loss


@pytest.mark.parametrize(
    ("text", "ndims", "written"),
    [
        ("ij,jk->ik", [2, 2], "ij,jk->ik"),
        ("ij,jk", [2, 2], "ij,jk->ik"),
        ("kj, ji", [2, 2], "kj,ji->ik"),
        ("ii", [2], "ii->"),
        ("...ij,...jk->...ik", [4, 3], "abij,bjk->abik"),
        ("...w,ow->...o", [3, 2], "abw,ow->abo"),
        ("...i,i", [3, 1], "abi,i->ab"),
    ],
)
def test_an_equation_has_all_its_letters(text, ndims, written):
    assert explicit(text, ndims) == written
    operands = [torch.arange(2.0**n).reshape([2] * n) for n in ndims]
    torch.testing.assert_close(torch.einsum(written, operands), torch.einsum(text, operands))


@pytest.mark.thorough
def test_a_dim_of_size_one_that_is_broadcast_is_dropped():
    def scaled(m: OneBody, x: Tensor) -> Tensor:
        return torch.einsum("...sw,...sw->...sw", x, m.scale.view(1, 1, 8))

    assert_expected_inline(
        canonical(scaled),
        """\
v0 = aten.reshape(scale, [1, 1, 8])
v1 = aten.reshape(v0, [8])
v2 = aten.einsum(asw,w->asw, [x, v1])
""",
    )


def test_a_letter_that_an_operand_has_twice_is_its_diagonal():
    def scaled(m: OneBody, x: Tensor) -> Tensor:
        return torch.einsum("bsw,ww->bsw", x, m.up.weight)

    assert_expected_inline(
        canonical(scaled),
        """\
v0 = aten.diagonal(up.weight, 0, 0, 1)
v1 = aten.einsum(bsw,w->bsw, [x, v0])
""",
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            None,
            """\
v0 = aten.einsum(asw,w->asw, [x, scale])
v1 = aten.einsum(asw,vw->asv, [v0, up.weight])
""",
        ),
        (
            [1, 2, 0, 1],
            """\
v0 = aten.einsum(w,vw->wv, [scale, up.weight])
v1 = aten.einsum(asw,wv->asv, [x, v0])
""",
        ),
    ],
)
def test_an_einsum_of_three_is_two_of_two_in_the_order_of_its_path(path: list[int] | None, text: str):
    def three(m: OneBody, x: Tensor) -> Tensor:
        return torch.ops.aten.einsum("asw,w,vw->asv", [x, m.scale, m.up.weight], path=path)

    assert canonical(three) == text


def test_products_of_vectors_are_matmul_and_an_outer_product_is_an_einsum():
    def vectors(m: OneBody, x: Tensor) -> Tensor:
        return x + torch.outer(m.scale, m.up.bias).mv(m.scale) * m.scale.dot(m.up.bias)

    assert_expected_inline(
        canonical(vectors),
        """\
v0 = aten.einsum(i,j->ij, [scale, up.bias])
v1 = aten.matmul(v0, scale)
v2 = aten.matmul(scale, up.bias)
v3 = aten.mul.Tensor(v1, v2)
v4 = aten.add.Tensor(x, v3)
""",
    )


def test_a_bilinear_is_an_einsum_then_an_add():
    def both(m: OneBody, x: Tensor) -> Tensor:
        return F.bilinear(x, x, m.up.weight.expand(8, 8, 8), m.up.bias)

    assert_expected_inline(
        canonical(both),
        """\
v0 = aten.expand(up.weight, [8, 8, 8])
v1 = aten.einsum(abI,OIJ,abJ->abO, [x, v0, x])
v2 = aten.add.Tensor(v1, up.bias)
""",
    )


@pytest.mark.thorough
def test_a_convolution_is_a_product_then_an_add():
    def convolved(m: OneBody, x: Tensor) -> Tensor:
        return F.conv1d(x.mT, m.up.weight.unsqueeze(-1), m.up.bias).mT

    assert_expected_inline(
        canonical(convolved),
        """\
v0 = aten.permute(x, [0, 2, 1])
v1 = aten.reshape(up.weight, [8, 8, 1])
v2 = aten.conv1d(v0, v1)
v3 = aten.reshape(up.bias, [8, 1])
v4 = aten.add.Tensor(v2, v3)
v5 = aten.permute(v4, [0, 2, 1])
""",
    )


@pytest.mark.thorough
def test_gates_and_slopes_are_their_parts():
    assert_expected_inline(
        canonical(lambda _, x: F.glu(torch.cat([x, x.sin()], -1))),
        """\
v0 = aten.sin(x)
v1 = aten.cat([x, v0], -1)
v2 = aten.split_with_sizes(v1, [8, 8], 2)
v3 = operator.getitem(v2, 0)
v4 = operator.getitem(v2, 1)
v5 = aten.sigmoid(v4)
v6 = aten.mul.Tensor(v3, v5)
""",
    )
    assert_expected_inline(
        canonical(lambda m, x: F.prelu(x.mT, m.scale).mT),
        """\
v0 = aten.permute(x, [0, 2, 1])
v1 = aten.reshape(scale, [1, 8, 1])
v2 = aten.gt.Scalar(v0, 0)
v3 = aten.mul.Tensor(v1, v0)
v4 = aten.where.self(v2, v0, v3)
v5 = aten.permute(v4, [0, 2, 1])
""",
    )


def test_a_cosine_is_a_sum_of_products_of_unit_vectors():
    def near(m: OneBody, x: Tensor) -> Tensor:
        return x * F.cosine_similarity(x, x.sin(), dim=-1).unsqueeze(-1)

    assert_expected_inline(
        canonical(near),
        """\
v0 = aten.sin(x)
v1 = aten.linalg_vector_norm(x, 2, [-1], True)
v2 = aten.clamp_min(v1, 1e-08)
v3 = aten.div.Tensor(x, v2)
v4 = aten.linalg_vector_norm(v0, 2, [-1], True)
v5 = aten.clamp_min(v4, 1e-08)
v6 = aten.div.Tensor(v0, v5)
v7 = aten.mul.Tensor(v3, v6)
v8 = aten.sum.dim_IntList(v7, [-1])
v9 = aten.reshape(v8, [2, 6, 1])
v10 = aten.mul.Tensor(x, v9)
""",
    )


@pytest.mark.thorough
def test_nll_of_a_log_softmax_is_a_cross_entropy():
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(y.log_softmax(-1).flatten(0, 1), labels.flatten(), ignore_index=3)

    assert_expected_inline(
        canonical_loss(loss),
        """\
v0 = aten.reshape(labels, [12])
v1 = aten.reshape(logits, [12, 16])
v2 = aten.cross_entropy_loss(v1, v0, None, 1, 3)
""",
    )


@pytest.mark.thorough
def test_nll_over_a_middle_dim_of_classes_is_over_rows():
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(y.transpose(1, 2).log_softmax(1), labels)

    assert_expected_inline(
        canonical_loss(loss),
        """\
v0 = aten.permute(logits, [0, 2, 1])
v1 = aten.permute(v0, [0, 2, 1])
v2 = aten.reshape(v1, [12, 16])
v3 = aten.reshape(labels, [12])
v4 = aten.cross_entropy_loss(v2, v3, None, 1, -100)
""",
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda y, *rest, **how: F.nll_loss(y.log_softmax(-1), *rest, **how)])
def test_the_loss_of_one_row_without_a_batch_is_one_over_rows(loss, reduction):
    found = canonical_loss(lambda y, labels: loss(y[0, 0], labels[0, 0], reduction=reduction).sum())
    assert re.search(r"(v\d+) = aten\.reshape\(v\d+, \[1, 16\]\)[^|]*aten\.cross_entropy_loss\(\1, ", found), found


@pytest.mark.thorough
def test_nll_of_a_log_softmax_over_another_dim_stays():
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(y.log_softmax(1).flatten(0, 1), labels.flatten())

    found = canonical_loss(loss)
    assert "aten.nll_loss" in found
    assert "cross_entropy" not in found


def test_the_log_probability_of_one_class_a_row_is_minus_its_cross_entropy():
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return -y.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()

    assert_expected_inline(
        canonical_loss(loss),
        """\
v0 = aten.reshape(labels, [2, 6, 1])
v1 = aten.reshape(logits, [12, 16])
v2 = aten.reshape(v0, [12])
v3 = aten.cross_entropy_loss(v1, v2, None, 0, -1099511627776)
v4 = aten.neg(v3)
v5 = aten.reshape(v4, [2, 6, 1])
v6 = aten.mean(v5)
v7 = aten.neg(v6)
""",
    )


@pytest.mark.thorough
def test_a_gather_of_two_classes_a_row_stays():
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return -y.log_softmax(-1).gather(-1, torch.stack([labels, 15 - labels], -1)).mean()

    assert "aten.gather(" in canonical_loss(loss)


MARGINS = {
    "p": lambda z, y: F.multi_margin_loss(z[:, 0], y[:, 0], p=2, margin=0.5, weight=z.new_ones(z.shape[-1]) / 3),
    "summed": lambda z, y: F.multi_margin_loss(z.flatten(0, 1), y.flatten(), reduction="sum"),
    "each": lambda z, y: F.multi_margin_loss(z[:, 1], y[:, 1], reduction="none").mean(),
}


@pytest.mark.parametrize("name", MARGINS)
def test_a_margin_over_all_classes_is_written_out_as_pytorch_writes_it(name):
    assert "margin" not in canonical_loss(MARGINS[name])
