"""Models that give logits, and losses that a user writes over them: one of its own, DPO, distillation.

DPO and distillation run two models, one of which is not trained: by ``combine``, and as a module that a user writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, Block
from planner import combine, with_loss
from tests.models.families import IGNORED, LENGTH, Entry, tokens

VOCABULARY = 40


def gpt(num_layers: int = 2) -> GPT:
    return GPT(VOCABULARY, LENGTH, 32, num_layers, 4)


def weighted_loss(outputs: tuple[Tensor, None], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the next tokens, each with its weight; and another figure."""
    logits, weights = outputs[0], batch["weights"]
    each = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="none").view_as(weights)
    return {"loss": (each * weights).sum() / weights.sum(), "largest": logits.detach().amax()}


def log_probability(model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
    """[b]: of the labels that count."""
    logits, _ = model(input_ids=ids)
    each = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return each.view_as(labels).sum(-1)


def dpo_loss(policy: Callable[..., Any], reference: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Two forwards of each model (Rafailov et al. 2023, equation 7)."""
    margin: Any = 0.0
    for sign, name in ((1, "chosen"), (-1, "rejected")):
        given = batch[name], batch[f"{name}_labels"]
        margin = margin + sign * (log_probability(policy, *given) - log_probability(reference, *given))
    return -F.logsigmoid(0.5 * margin).mean()


def joined_dpo_loss(policy: Callable[..., Any], reference: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """One forward of each model over both answers."""
    ids = torch.cat([batch["chosen"], batch["rejected"]])
    labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
    chosen, rejected = (log_probability(policy, ids, labels) - log_probability(reference, ids, labels)).chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def distillation_loss(student: Callable[..., Any], teacher: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy with the labels, and with the teacher's distribution at temperature 2 (Hinton et al. 2015)."""
    (ours, _), (theirs, _) = student(input_ids=batch["input_ids"]), teacher(input_ids=batch["input_ids"])
    hard = F.cross_entropy(ours.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    soft = -(F.softmax(theirs / 2, -1) * F.log_softmax(ours / 2, -1)).sum(-1).mean()
    return 0.5 * hard + 2.0 * soft


class Dpo(nn.Module):
    """As a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = gpt(), gpt().requires_grad_(False)

    def forward(self, chosen: Tensor, chosen_labels: Tensor, rejected: Tensor, rejected_labels: Tensor) -> Tensor:
        margin: Any = 0.0
        for sign, given in ((1, (chosen, chosen_labels)), (-1, (rejected, rejected_labels))):
            with torch.no_grad():
                expected = log_probability(self.reference, *given)
            margin = margin + sign * (log_probability(self.policy, *given) - expected)
        return -F.logsigmoid(0.5 * margin).mean()


class Distillation(nn.Module):
    """As a user writes it, with a larger teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = gpt(3).requires_grad_(False), gpt()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            theirs, _ = self.teacher(input_ids)
        ours, _ = self.student(input_ids)
        soft = F.kl_div(F.log_softmax(ours, -1), F.log_softmax(theirs, -1), reduction="none", log_target=True)
        return F.cross_entropy(ours.flatten(0, 1), labels.flatten(), ignore_index=IGNORED) + soft.sum(-1).mean()


class MixedTeacher(nn.Module):
    """A teacher that first mixes tokens in a way that no rank can do for its own; causal attention follows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.table = nn.Parameter(torch.randn(LENGTH, LENGTH)), nn.Embedding(VOCABULARY, 32)
        self.block, self.head = Block(32, 4, 0.0), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        return self.head(self.block(torch.tril(self.mix) @ self.table(input_ids))), None


PAIRS = tokens(VOCABULARY, labels="chosen_labels") | tokens(VOCABULARY, labels="rejected_labels")
OF_DPO = {
    name: PAIRS["input_ids"] if name in ("chosen", "rejected") else PAIRS[name]
    for name in ("chosen", "chosen_labels", "rejected", "rejected_labels")
}


def dpo(loss: Callable[..., Tensor]) -> Entry:
    model = combine(loss=loss, frozen=["reference"], policy=gpt(), reference=gpt())
    return Entry(model, OF_DPO, labels=("chosen_labels", "rejected_labels"))


def distillation(teacher: Callable[[], nn.Module] = lambda: gpt(3)) -> Entry:
    model = combine(loss=distillation_loss, frozen=["teacher"], student=gpt(), teacher=teacher())
    return Entry(model, tokens(VOCABULARY), labels=("labels",))


def own_loss() -> Entry:
    inputs = tokens(VOCABULARY, labels="next") | {"weights": ((LENGTH,), torch.float64, None)}
    return Entry(with_loss(gpt(), weighted_loss), inputs)


MODELS: dict[str, Callable[[], Entry]] = {
    "own-loss": own_loss,
    "dpo": partial(dpo, dpo_loss),
    "dpo-joined": partial(dpo, joined_dpo_loss),
    "dpo-module": lambda: Entry(Dpo(), OF_DPO, labels=("chosen_labels", "rejected_labels")),
    "distillation": distillation,
    "distillation-mixed": partial(distillation, MixedTeacher),
    "distillation-module": lambda: Entry(Distillation(), tokens(VOCABULARY), labels=("labels",)),
}
