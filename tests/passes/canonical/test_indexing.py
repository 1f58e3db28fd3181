"""Indices of known runs are slices, writes into parts are concatenations, equally long bags are written out."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import OneBody, assert_capture_equals
from tests.tools.canonical import canonical


@pytest.mark.thorough
def test_a_run_of_indices_is_a_slice():
    assert_expected_inline(
        canonical(lambda _, x: torch.cat([x[:, [3, 4, 5]], x[:, [0, 1, 2]]], 1)),
        """\
v0 = aten.slice.Tensor(x, 1, 3, 6)
v1 = aten.slice.Tensor(x, 1, 0, 3)
v2 = aten.cat([v0, v1], 1)
""",
    )
    assert_expected_inline(
        canonical(lambda _, x: x[:, [0, 1, 2, 3, 4, 5]].sin()),
        """\
v0 = aten.sin(x)
""",
    )


def test_negative_indices_are_counted_from_the_end():
    assert_expected_inline(
        canonical(lambda _, x: x + x[:, [-2, -1]].sum(1, keepdim=True)),
        """\
v0 = aten.slice.Tensor(x, 1, 4, 6)
v1 = aten.sum.dim_IntList(v0, [1], True)
v2 = aten.add.Tensor(x, v1)
""",
    )


@pytest.mark.thorough
def test_rows_in_another_order_stay_an_index():
    assert canonical(lambda _, x: x[:, [5, 4, 3, 2, 1, 0]]).count("aten.index.Tensor(x, ") == 1
    assert canonical(lambda _, x: x[:, [0, 0, 1, 1, 2, 2]]).count("aten.index.Tensor(x, ") == 1


@pytest.mark.thorough
def test_an_index_that_the_batch_gives_stays():
    def chosen(_: OneBody, x: Tensor) -> Tensor:
        return x[:, x[..., 0].argsort(-1)[0]]

    assert canonical(chosen).count("aten.index.Tensor(x, ") == 1


def test_one_number_of_the_batch_is_an_index():
    """As x[n] is captured: with the number in place of the tensor that holds it."""

    def counted_from_the_end(_: OneBody, x: Tensor) -> Tensor:
        return x + x[:, x.argmax() % 6 - 6].unsqueeze(1)

    assert_capture_equals(OneBody(counted_from_the_end))
    assert_expected_inline(
        canonical(counted_from_the_end),
        """\
v0 = aten.argmax(x)
v1 = aten.remainder.Scalar(v0, 6)
v2 = aten.sub.Tensor(v1, 6)
v3 = aten.reshape(v2, [1])
v4 = aten.index.Tensor(x, [None, v3])
v5 = aten.reshape(v4, [2, 8])
v6 = aten.reshape(v5, [2, 1, 8])
v7 = aten.add.Tensor(x, v6)
""",
    )


def test_a_write_into_a_part_is_a_concatenation():
    def written(m: OneBody, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 2:4] = m.up(x)[:, 2:4]
        return y

    assert_expected_inline(
        canonical(written),
        """\
v0 = aten.mul.Tensor(x, 2)
v1 = aten.linear(x, up.weight)
v2 = aten.add.Tensor(v1, up.bias)
v3 = aten.slice.Tensor(v2, 1, 2, 4)
v4 = aten.slice.Tensor(v0, 1, 0, 2)
v5 = aten.slice.Tensor(v0, 1, 4, 6)
v6 = aten.cat([v4, v3, v5], 1)
""",
    )


def test_a_write_of_one_row_is_a_concatenation():
    def written(m: OneBody, x: Tensor) -> Tensor:
        y = x * 2
        y[:, -1] = m.scale
        return y

    assert_expected_inline(
        canonical(written),
        """\
v0 = aten.mul.Tensor(x, 2)
v1 = aten.expand(scale, [2, 8])
v2 = aten.reshape(v1, [2, 1, 8])
v3 = aten.slice.Tensor(v0, 1, 0, 5)
v4 = aten.cat([v3, v2], 1)
""",
    )


@pytest.mark.thorough
def test_parts_written_one_after_the_other_are_one_concatenation_of_what_was_written():
    def written(m: OneBody, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:, :3] = x[:, 3:].sin()
        y[:, 3:] = x[:, :3].cos()
        return y

    found = canonical(written)
    assert "empty" not in found
    assert_expected_inline(
        found,
        """\
v0 = aten.slice.Tensor(x, 1, 3, 6)
v1 = aten.sin(v0)
v2 = aten.slice.Tensor(x, 1, 0, 3)
v3 = aten.cos(v2)
v4 = aten.cat([v1, v3], 1)
""",
    )


@pytest.mark.thorough
def test_a_copy_into_the_whole_is_its_source_cast_and_broadcast():
    def copied(m: OneBody, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).copy_(m.scale.float())

    assert_expected_inline(
        canonical(copied),
        """\
v0 = aten.to.dtype(scale, torch.float32)
v1 = aten.to.dtype(v0, torch.float64)
v2 = aten.expand(v1, [2, 6, 8])
v3 = aten.add.Tensor(x, v2)
""",
    )


def test_a_repeat_is_a_new_dim_that_is_expanded():
    assert_expected_inline(
        canonical(lambda _, x: x[..., :4].repeat(1, 1, 2)),
        """\
v0 = aten.slice.Tensor(x, 2, 0, 4)
v1 = aten.reshape(v0, [2, 6, 1, 4])
v2 = aten.expand(v1, [2, 6, 2, 4])
v3 = aten.reshape(v2, [2, 6, 8])
""",
    )


def test_a_repeat_of_one_element_is_expanded_in_place():
    assert_expected_inline(
        canonical(lambda _, x: x[:, :1].repeat(1, 6, 1)),
        """\
v0 = aten.slice.Tensor(x, 1, 0, 1)
v1 = aten.expand(v0, [2, 6, 8])
""",
    )


def test_a_repeat_of_nothing_is_nothing():
    assert_expected_inline(
        canonical(lambda _, x: x.repeat(1, 1, 1).sin()),
        """\
v0 = aten.sin(x)
""",
    )


@pytest.mark.thorough
def test_even_and_odd_features_written_are_put_together_in_a_dim_of_two():
    def written(m: OneBody, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[..., ::2] = x[..., ::2].sin()
        y[..., 1::2] = x[..., 1::2].cos()
        return y

    assert_expected_inline(
        canonical(written),
        """\
v0 = aten.slice.Tensor(x, 2, 0, 7, 2)
v1 = aten.sin(v0)
v2 = aten.reshape(v1, [2, 6, 4, 1])
v3 = aten.slice.Tensor(x, 2, 1, 8, 2)
v4 = aten.cos(v3)
v5 = aten.reshape(v4, [2, 6, 4, 1])
v6 = aten.cat([v2, v5], 3)
v7 = aten.reshape(v6, [2, 6, 8])
""",
    )


@pytest.mark.thorough
def test_every_third_feature_of_eight_stays_a_write():
    def written(m: OneBody, x: Tensor) -> Tensor:
        y = x * 2
        y[..., ::3] = x[..., ::3].sin()
        return y

    assert canonical(written).count("aten.slice_scatter") == 1


def test_a_slice_of_a_concatenation_or_of_a_slice_is_one_of_what_they_are_made_of():
    def taken(_, x):
        joined = torch.cat([x[:, :4][:, 1:3].sin(), x], 1)
        return x + joined[:, 3:7].sum(1, keepdim=True)

    assert_expected_inline(
        canonical(taken),
        """\
v0 = aten.slice.Tensor(x, 1, 1, 5)
v1 = aten.sum.dim_IntList(v0, [1], True)
v2 = aten.add.Tensor(x, v1)
""",
    )


def test_what_a_region_without_gradients_takes_from_outside_has_none():
    def taken(_, x):
        joined = torch.cat([x.sin(), x.cos()], 1)
        with torch.no_grad():
            part = joined[:, : x.shape[1]]
        return part + x

    assert "aten.detach(" in canonical(taken)


# ---- bags of embeddings: equally long ones are written out, and compute what PyTorch's op does, values and gradients


CLASSES, WIDTH = 11, 4


class Bags(nn.Module):
    def __init__(self, is_weighted: bool = False, **options: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH, **options)  # pyright: ignore[reportArgumentType]
        self.weights = nn.Parameter(torch.rand(6)) if is_weighted else None

    def forward(self, ids: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights.expand(ids.shape)
        return self.bag(ids, per_sample_weights=weights).sin().sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize(
    "options", [{"mode": m} for m in ("sum", "mean", "max")] + [{"mode": "sum", "is_weighted": True}]
)
def test_equally_long_bags_are_written_out_and_compute_the_same(
    options: dict[str, object], padding: int | None
) -> None:
    torch.manual_seed(0)
    model = Bags(padding_idx=padding, **options).double()  # pyright: ignore[reportArgumentType]
    ids = torch.randint(CLASSES, (5, 6))
    ids[0], ids[1, :3] = 2, 2
    program = capture(model, {"ids": ids})
    assert not any("embedding_bag" in str(node.target) for node in program.graph.graph.nodes)
    model(ids).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    given = {name: model.get_parameter(fqn) for name, fqn in program.parameters.items()} | {"ids": ids}
    holders = program.graph.graph.find_nodes(op="placeholder")
    (loss,) = program.graph(*(given[node.name] for node in holders))
    torch.testing.assert_close(loss, model(ids))
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_a_gradient_by_counts_in_the_batch_is_refused() -> None:
    with pytest.raises(PlanError, match="scale_grad_by_freq"):
        capture(Bags(scale_grad_by_freq=True), {"ids": torch.zeros(2, 3, dtype=torch.int64)})
