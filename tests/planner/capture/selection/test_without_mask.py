"""`if not pad.any(): pad = None`: captured is the branch with the mask, if the other is the same without padding."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.program.program import Program
from planner import PlanError
from planner.capture.export import capture
from planner.capture.selection import settle

Body = Callable[["Padded", Tensor, Tensor | None], Tensor]


class Padded(nn.Module):
    def __init__(self, body: Body, of_some: bool) -> None:
        super().__init__()
        self.of_some = of_some
        self.embed, self.qkv, self.head = nn.Embedding(20, 8, padding_idx=1), nn.Linear(8, 24), nn.Linear(8, 20)
        self.attend, self.body = nn.MultiheadAttention(8, 2, batch_first=True), body

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        pad: Tensor | None = ids.eq(1)
        if not pad.any():
            pad = None
        x = self.body(self, self.embed(ids), pad)
        if self.of_some:
            return F.cross_entropy(self.head(x)[labels != 0], labels[labels != 0])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def own_scores(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    if pad is not None:
        x = x * (1 - pad.unsqueeze(-1).type_as(x))
    q, k, v = model.qkv(x).chunk(3, -1)
    scores = q @ k.transpose(1, 2)
    if pad is not None:
        scores = scores.masked_fill(pad[:, None], float("-inf"))
    return x + scores.softmax(-1) @ v


def fused(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in model.qkv(x).chunk(3, -1))
    mask = None if pad is None else ~pad[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)


def of_pytorch(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    return model.attend(x, x, x, key_padding_mask=pad, need_weights=False)[0]


def mean_of_kept(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    if pad is None:
        return x - x.mean(1, keepdim=True)
    kept = (~pad).type_as(x)[..., None]
    return x - (x * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)


def doubled(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    return x * 2 if pad is None else x.masked_fill(pad[..., None], 0.0)


def without_gradient(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    return x.detach() if pad is None else x.masked_fill(pad[..., None], 0.0)


def scaled_sum(model: Padded, x: Tensor, pad: Tensor | None) -> Tensor:
    return x if pad is None else torch.add(pad.type_as(x)[..., None].expand_as(x), x, alpha=2)


def captured(body: Body, of_some: bool = False) -> tuple[Padded, Program]:
    torch.manual_seed(0)
    model, ids = Padded(body, of_some).double(), torch.empty((3, 5), dtype=torch.int64, device="meta")
    return model, capture(model, {"ids": ids, "labels": ids})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of_some", [False, True], ids=["all labels", "selected labels"])
@pytest.mark.parametrize("body", [own_scores, fused, of_pytorch, mean_of_kept])
def test_one_graph_computes_batches_with_and_without_padding(body: Body, of_some: bool) -> None:
    model, program = captured(body, of_some)
    for lowest in (0, 2):
        ids, labels = torch.randint(lowest, 20, (2, 3, 5))
        ids[:, 0] = 3
        ids[0, 2] = 1 if lowest == 0 else 2
        given = {n: model.get_parameter(fqn) for n, fqn in program.parameters.items()} | {"ids": ids, "labels": labels}
        given |= dict(program.constants)
        (loss,) = program.graph(*(given[n.name] for n in program.graph.graph.find_nodes(op="placeholder")))
        torch.testing.assert_close(loss, model(ids, labels))
    assert any("test_without_mask.py" in str(where) for what, where in program.rewrites if "for every batch" in what)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of_some", [False, True], ids=["all labels", "selected labels"])
@pytest.mark.parametrize("body", [doubled, without_gradient, scaled_sum])
def test_another_result_or_gradient_without_the_mask_is_refused_at_its_line(body: Body, of_some: bool) -> None:
    with pytest.raises(PlanError, match="depends on whether any row is selected") as error:
        captured(body, of_some)
    assert "if not pad.any()" in str(error.value.where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", [own_scores, fused])
def test_masks_that_fold_need_no_run(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of any size: none may run."""
    monkeypatch.setattr(settle, "CHEAP", 0)
    captured(body)
    with pytest.raises(PlanError, match="depends on whether any row"):
        captured(mean_of_kept)
