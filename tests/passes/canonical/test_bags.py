"""Bags of embeddings: equally long ones are written out, and compute what PyTorch's op does, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner import PlanError
from planner.capture.export import capture

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
