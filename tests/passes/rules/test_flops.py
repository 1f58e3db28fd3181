from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from passes.program.ops.aten import is_random, is_view
from passes.rules.flops import has_flops, node_bytes, node_cost, node_flops
from tests.models.small import hugging_face

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A one-call graph's node: tensors become placeholders, the value is computed on meta."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = value
            return node
        return [place(v) for v in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(place(a) for a in args), {k: place(v) for k, v in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs)
    return node


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def two_ways(size: int, gates: int) -> list[torch.Tensor]:
    """Weights and biases of a bidirectional recurrent layer with a state of 4."""
    return [meta(gates, size), meta(gates, 4), meta(gates), meta(gates)] * 2


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (lambda: call(aten.linear.default, meta(2, 3, 5), meta(7, 5)), 2 * 6 * 5 * 7),
        (lambda: call(aten.mm.default, meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        (lambda: call(aten.addmm.default, meta(7), meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        (lambda: call(aten.bmm.default, meta(4, 3, 5), meta(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
        (lambda: call(aten.baddbmm.default, meta(4, 3, 7), meta(4, 3, 5), meta(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
        (lambda: call(aten.addbmm.default, meta(3, 7), meta(4, 3, 5), meta(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
        (lambda: call(aten.matmul.default, meta(2, 4, 3, 5), meta(4, 5, 7)), 2 * 2 * 4 * 3 * 5 * 7),
        (lambda: call(aten.matmul.default, meta(3, 5), meta(5)), 2 * 3 * 5),
        (
            lambda: call(
                aten.gru.input, meta(2, 3, 5), meta(2, 2, 4), two_ways(5, 3 * 4), True, 1, 0.0, True, True, True
            ),
            2 * 2 * 6 * 12 * (5 + 4),
        ),
        (
            lambda: call(
                aten.scaled_dot_product_attention.default, meta(2, 4, 3, 8), meta(2, 4, 6, 8), meta(2, 4, 6, 10)
            ),
            2 * 2 * 4 * 3 * 6 * (8 + 10),
        ),
        (
            lambda: call(aten.conv2d.default, meta(1, 3, 8, 8), meta(16, 3, 4, 4), None, [4, 4]),
            2 * (16 * 2 * 2) * (3 * 16),
        ),
        (
            lambda: call(aten.conv1d.default, meta(1, 4, 10), meta(8, 2, 3), None, [1], [1], [1], 2),
            2 * (8 * 10) * (2 * 3),
        ),
        (lambda: call(aten.conv_transpose1d.default, meta(1, 4, 10), meta(4, 8, 3)), 2 * (4 * 10) * (8 * 3)),
        (
            lambda: call(aten.einsum.default, "bshd,bthd->bhst", [meta(2, 3, 4, 5), meta(2, 6, 4, 5)]),
            2 * 2 * 3 * 6 * 4 * 5,
        ),
        (
            lambda: call(aten.conv2d.default, meta(2, 4, 9, 9), meta(8, 1, 3, 3), None, [2, 2], [1, 1], [1, 1], 4),
            2 * 16 * 25 * 9,
        ),
        (lambda: call(aten.einsum.default, "ij->i", [meta(2, 3)]), 0),
        (lambda: call(aten.einsum.default, "...i,oi->...o", [meta(2, 3, 5), meta(7, 5)]), 2 * 2 * 3 * 5 * 7),
        (lambda: call(aten.einsum.default, "ij,jk,kl->il", [meta(2, 3), meta(3, 5), meta(5, 7)]), 2 * 30 + 2 * 70),
        (lambda: call(aten.embedding.default, meta(50, 8), meta(2, 3, dtype=torch.long)), 0),
        (lambda: call(aten.add.Tensor, meta(2, 3), meta(2, 3)), 0),
    ],
)
def test_operations_of_a_product(node: Callable[[], fx.Node], flops: int) -> None:
    assert node_flops(node()) == flops
    assert has_flops(node()) == (flops > 0)


def test_an_elementwise_op_moves_its_operands_and_its_result() -> None:
    node = call(aten.add.Tensor, meta(4, 5), meta(5))
    assert node_bytes(node) == 4 * (20 + 5 + 20)
    assert node_cost(node, flops_per_byte=2) == 2 * node_bytes(node)


def test_views_cost_nothing_and_conversions_do() -> None:
    for node in (
        call(aten.reshape.default, meta(4, 5), [20]),
        call(aten.permute.default, meta(4, 5), [1, 0]),
        call(aten.expand.default, meta(1, 5), [4, 5]),
        call(aten.split_with_sizes.default, meta(4, 5), [2, 3], 1),
    ):
        assert is_view(node)
        assert node_cost(node) == 0
    assert node_bytes(call(aten.to.dtype, meta(4, 5), torch.bfloat16)) == 20 * (4 + 2)
    assert not is_view(call(aten.clone.default, meta(4, 5)))


def test_random_is_dropout_and_attention_with_dropout() -> None:
    q = meta(1, 2, 3, 4)
    assert is_random(call(aten.dropout.default, q, 0.1, True))
    assert is_random(call(aten.scaled_dot_product_attention.default, q, q, q, None, 0.1))
    assert not is_random(call(aten.scaled_dot_product_attention.default, q, q, q))
    assert not is_random(call(aten.softmax.int, q, -1))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_a_family_costs_what_the_counter_of_pytorch_counts(family: str) -> None:
    program = hugging_face(family)
    values = [n.meta["val"] for n in program.graph.graph.nodes if n.op == "placeholder"]
    inputs = [torch.zeros(v.shape, dtype=v.dtype) for v in values]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        program.graph(*inputs)
    assert sum(node_flops(n) for n in program.graph.graph.nodes) == counter.get_total_flops()


def test_bias_free_attention_by_hand_counts_both_products() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.softmax(q @ k.mT, -1) @ k

    exported = torch.export.export(_Function(attention), (meta(2, 3, 5), meta(2, 7, 5)))
    assert sum(node_flops(n) for n in exported.graph.nodes) == 2 * (2 * 2 * 3 * 7 * 5)


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)
