"""A small decoder whose loss reads its sequence in a way of its own: shifted, pooled, by one token, or as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.plain import Plain

LENGTH, VOCABULARY, IGNORED = 16, 50, -100
Loss = Callable[[Tensor, Tensor], Tensor]


class Reader(Plain):
    """``loss``: of logits [b, s, v] and labels [b, s]; ``mixes``: what else is done to the tokens."""

    def __init__(self, loss: Loss, mixes: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(VOCABULARY, LENGTH, 16, 2, 1, causal=True)
        self.loss, self.mixes = loss, mixes

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x, attention_mask)
        x = x if self.mixes is None else self.mixes(x)
        return self.loss(self.head(self.norm(x)), labels)


def _valid(labels: Tensor) -> Tensor:
    return labels.clamp(min=0)


def _rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return _rows(logits[:, :-1], labels[:, 1:])


def _classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].transpose(1, 2), labels[..., 1:])


def _masked(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), _valid(labels[:, 1:]), reduction="none")
    mask = (labels[:, 1:] != IGNORED).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def _by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    found = logits[:, :-1].log_softmax(-1).gather(-1, _valid(labels[:, 1:]).unsqueeze(-1)).squeeze(-1)
    mask = (labels[:, 1:] != IGNORED).to(found.dtype)
    return -(found * mask).sum() / mask.sum()


def _with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return _shifted(logits, labels) + 1e-2 * logits[:, 1:].logsumexp(-1).square().mean()


def _distance(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits[:, :-1], F.one_hot(_valid(labels[:, 1:]), VOCABULARY).to(logits.dtype))


def _pooled(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).to(logits.dtype).unsqueeze(-1)
    return F.cross_entropy((logits * mask).sum(1) / mask.sum(1).clamp(min=1), _valid(labels[:, 0]))


def _last_valid(logits: Tensor, labels: Tensor) -> Tensor:
    last = (labels != IGNORED).sum(1).sub(1).clamp(min=0)
    return F.cross_entropy(logits[torch.arange(len(last), device=last.device), last], _valid(labels[:, 0]))


def _added_twice(logits: Tensor, labels: Tensor) -> Tensor:
    """A pooled value that goes back to every token: whole and cut in turn."""
    return _rows(logits + logits.mean(1, keepdim=True).tanh(), labels)


def _probabilities(labels: Tensor) -> Tensor:
    """[b, s, classes]: most of it for the label."""
    return F.one_hot(_valid(labels), VOCABULARY).double() * 0.9 + 0.1 / VOCABULARY


def _of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), _probabilities(labels).flatten(0, 1)) + 0.1 * logits.square().mean()


def _of_probabilities_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, _probabilities(labels).mT)


def _weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.arange(1, VOCABULARY + 1, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, label_smoothing=0.1)


LOSSES: dict[str, Loss] = {
    "shifted": _shifted,
    "shifted, classes second": _classes_second,
    "shifted, masked": _masked,
    "shifted, by hand": _by_hand,
    "shifted, with a penalty on others": _with_penalty,
    "shifted, distance": _distance,
    "first token": lambda logits, labels: F.cross_entropy(logits[:, 0], _valid(labels[:, 0])),
    "last token": lambda logits, labels: F.cross_entropy(logits[:, -1], _valid(labels[:, 0])),
    "rows of some tokens": lambda logits, labels: F.cross_entropy(
        logits[:, :12].unflatten(1, (4, 3)).square().mean((1, 2)), _valid(labels[:, 0])
    ),
    "mean of tokens": lambda logits, labels: F.cross_entropy(logits.mean(1), _valid(labels[:, 0])),
    "largest of tokens": lambda logits, labels: F.cross_entropy(logits.amax(1), _valid(labels[:, 0])),
    "mean of some": _pooled,
    "last valid token": _last_valid,
    "mean and tokens": _added_twice,
    "probabilities": _of_probabilities,
    "probabilities, classes second": _of_probabilities_second,
    "weights of classes, smoothed": _weighted,
}
# what reads the whole sequence, makes as much of it, and is not computed by every rank: op → the part of the model
REFUSED: dict[str, tuple[Loss, Callable[[Tensor], Tensor]]] = {
    "aten.linear": (_rows, lambda x: F.linear(x.mT, x.new_ones(LENGTH, LENGTH).tril()).mT),
}


def reader(name: str) -> Reader:
    """The model with that loss, in float64."""
    torch.manual_seed(1)
    return Reader(LOSSES[name]).double()


def refused(op: str) -> Reader:
    return Reader(*REFUSED[op]).double()
