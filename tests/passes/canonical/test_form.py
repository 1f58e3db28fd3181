"""Many spellings of one idea are one graph; every case also computes the model's loss and gradients (tests.tools)."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from planner.capture.export import capture
from tests.models.one_body import OneBody, batch
from tests.tools.canonical import canonical, canonical_loss


def test_a_linear_is_a_product_then_an_add():
    assert_expected_inline(
        canonical(lambda m, x: m.up(x)),
        """\
v0 = aten.linear(x, up.weight)
v1 = aten.add.Tensor(v0, up.bias)
""",
    )


@pytest.mark.thorough
def test_addmm_and_baddbmm_are_products_then_adds_with_their_factors():
    def added(m: OneBody, x: Tensor) -> Tensor:
        return torch.addmm(m.up.bias, x.flatten(0, 1), m.up.weight, beta=2, alpha=3).view_as(x)

    assert_expected_inline(
        canonical(added),
        """\
v0 = aten.reshape(x, [12, 8])
v1 = aten.mm(v0, up.weight)
v2 = aten.mul.Tensor(v1, 3)
v3 = aten.mul.Tensor(up.bias, 2)
v4 = aten.add.Tensor(v2, v3)
v5 = aten.reshape(v4, [2, 6, 8])
""",
    )
    assert_expected_inline(
        canonical(lambda m, x: torch.baddbmm(x, x, m.up.weight.expand(2, 8, 8))),
        """\
v0 = aten.expand(up.weight, [2, 8, 8])
v1 = aten.bmm(x, v0)
v2 = aten.add.Tensor(v1, x)
""",
    )


def test_what_beta_0_leaves_out_is_not_read():
    def product(m: OneBody, x: Tensor) -> Tensor:
        return torch.addmm(m.up.bias, x.flatten(0, 1), m.up.weight, beta=0).view_as(x)

    assert_expected_inline(
        canonical(product),
        """\
v0 = aten.reshape(x, [12, 8])
v1 = aten.mm(v0, up.weight)
v2 = aten.reshape(v1, [2, 6, 8])
""",
    )


def test_dropout_that_drops_nothing_is_nothing():
    assert_expected_inline(canonical(lambda _, x: F.dropout(F.dropout(x, 0.0), 0.5, training=False)), """""")


@pytest.mark.thorough
def test_assertions_aliases_and_what_nobody_reads_are_gone():
    def noisy(m: OneBody, x: Tensor) -> Tensor:
        m.up(x).softmax(-1)
        torch._assert_async((m.scale > -1).all())
        return torch.ops.aten.alias(x) * 2

    assert_expected_inline(
        canonical(noisy),
        """\
v0 = aten.mul.Tensor(x, 2)
""",
    )


@pytest.mark.thorough
def test_what_runs_without_gradients_reads_detached_values():
    def frozen(m: OneBody, x: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = x * m.scale
        return x + scaled

    assert_expected_inline(
        canonical(frozen),
        """\
v0 = aten.detach(x)
v1 = aten.detach(scale)
v2 = aten.mul.Tensor(v0, v1)
v3 = aten.add.Tensor(x, v2)
""",
    )


@pytest.mark.thorough
def test_gradients_switched_on_inside_no_grad_are_still_off_outside_of_it():
    def nested(m: OneBody, x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = x.sin()
            with torch.enable_grad():
                inner = inner * m.scale
            outer = x.cos()
        return x + inner + outer

    assert_expected_inline(
        canonical(nested),
        """\
v0 = aten.detach(x)
v1 = aten.sin(v0)
v2 = aten.mul.Tensor(v1, scale)
v3 = aten.detach(x)
v4 = aten.cos(v3)
v5 = aten.add.Tensor(x, v2)
v6 = aten.add.Tensor(v5, v4)
""",
    )


@pytest.mark.thorough
def test_a_fill_of_the_like_of_a_tensor_reads_no_tensor():
    assert_expected_inline(
        canonical(lambda _, x: x * x.new_full((8,), 2.0) + x.new_ones(8)),
        """\
v0 = aten.full([8], 2.0, dtype=torch.float64, device=cpu)
v1 = aten.mul.Tensor(x, v0)
v2 = aten.full([8], 1, dtype=torch.float64, device=cpu)
v3 = aten.add.Tensor(v1, v2)
""",
    )


def test_what_is_read_for_its_sizes_alone_is_not_computed():
    assert_expected_inline(
        canonical(lambda m, x: x + torch.full_like(m.up(x)[..., :1], 2.0) * torch.ones_like(x)),
        """\
v0 = aten.full([2, 6, 1], 2.0, dtype=torch.float64, device=cpu)
v1 = aten.ones_like(x, pin_memory=False)
v2 = aten.mul.Tensor(v0, v1)
v3 = aten.add.Tensor(x, v2)
""",
    )


def test_native_layer_norm_is_layer_norm():
    assert_expected_inline(
        canonical(lambda m, x: torch.native_layer_norm(x, [8], m.scale, None, 1e-5)[0]),
        """\
v0 = aten.layer_norm(x, [8], scale, None, 1e-05)
""",
    )


@pytest.mark.thorough
def test_a_cross_entropy_over_a_middle_dim_of_classes_is_one_over_rows():
    assert_expected_inline(
        canonical_loss(lambda y, labels: F.cross_entropy(y.transpose(1, 2), labels)),
        """\
v0 = aten.permute(logits, [0, 2, 1])
v1 = aten.permute(v0, [0, 2, 1])
v2 = aten.reshape(v1, [12, 16])
v3 = aten.reshape(labels, [12])
v4 = aten.cross_entropy_loss(v2, v3)
""",
    )


def test_an_unreduced_cross_entropy_has_its_shape_again():
    def weighed(y: Tensor, labels: Tensor) -> Tensor:
        return (F.cross_entropy(y.transpose(1, 2), labels, reduction="none") * labels).mean()

    assert_expected_inline(
        canonical_loss(weighed),
        """\
v0 = aten.permute(logits, [0, 2, 1])
v1 = aten.permute(v0, [0, 2, 1])
v2 = aten.reshape(v1, [12, 16])
v3 = aten.reshape(labels, [12])
v4 = aten.cross_entropy_loss(v2, v3, None, 0)
v5 = aten.reshape(v4, [2, 6])
v6 = aten.mul.Tensor(v5, labels)
v7 = aten.mean(v6)
""",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("body", [lambda m, x: m.up(x), lambda m, x: x + m.up(x).detach(), lambda m, x: x.argmax(-1)])
def test_every_node_says_its_value_and_whether_it_has_a_gradient(body):
    def summed(m: OneBody, x: Tensor) -> Tensor:
        return x * m.scale + body(m, x).sum()

    program = capture(OneBody(summed), batch())
    for node in program.graph.graph.nodes:
        if node.op != "output":
            floating = node.meta["val"].is_floating_point()
            detached = node.target is torch.ops.aten.detach.default
            reads = node.op == "placeholder" or any(n.meta["grad"] for n in node.all_input_nodes)
            passed_on = node.name == program.loss or any(user.meta.get("grad") for user in node.users)
            assert node.meta["grad"] == (floating and reads and not detached and passed_on), node.name
