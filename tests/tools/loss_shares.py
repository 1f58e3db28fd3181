"""Hold the shares of microbatches against the model itself on the whole global batch, in one process and float64."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.partition.batch.align_exports import wider
from passes.partition.loss.counts import LossTerms
from passes.partition.loss.shares import share_loss
from passes.program.program import Program
from planner.capture.export import capture

LENGTH, WIDTH, CLASSES, IGNORED = 6, 4, 8, -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Small(nn.Module):
    """Logits of one linear; ``loss(logits, labels, weight)``."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES), loss
        self.register_buffer("scales", torch.linspace(0.5, 1.5, LENGTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), labels, self.head.weight)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def built(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model().double()


def inputs_of(num_sequences: int) -> dict[str, Tensor]:
    return {name: torch.zeros(num_sequences, LENGTH, dtype=torch.int64, device="meta") for name in ("ids", "labels")}


def batch_of(num_sequences: int) -> dict[str, Tensor]:
    """Sequences with fewer and fewer valid labels; none has no valid one."""
    generator = torch.Generator().manual_seed(num_sequences)
    ids, labels = torch.randint(CLASSES, (2, num_sequences, LENGTH), generator=generator)
    kept = 1 + torch.arange(num_sequences) * (LENGTH - 1) // max(1, num_sequences - 1)
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(LENGTH) >= kept[:, None], IGNORED)}


@dataclass
class Shared:
    """``difference``: of the loss and all gradients from the model's own; ``captured``: sizes of the captures made."""

    difference: float
    captured: list[int]
    terms: LossTerms

    @property
    def is_told(self) -> bool:
        terms = self.terms
        return bool(terms.inexact or terms.added or terms.mixed or terms.doubts)


def shared(model: Callable[[], nn.Module], micro: int, num_microbatches: int) -> Shared:
    captured: list[int] = []

    def captures(times: int) -> Program:
        captured.append(micro * times)
        return capture(built(model), wider(inputs_of(micro), times))

    program = captures(1)
    terms = share_loss(program, num_microbatches, captures)
    batch = batch_of(micro * num_microbatches)
    here, there = built(model), built(model)
    expected = there(**batch)
    expected.backward()
    found = _sum_of_shares(program, terms, here, batch, micro)
    found.backward()
    pairs = [(found, expected), *((p.grad, q.grad) for p, q in zip(here.parameters(), there.parameters(), strict=True))]
    difference = max(_difference(a, b) for a, b in pairs)
    return Shared(difference, captured, terms)


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if all(x is None or not x.any() for x in (a, b)) else float("inf")
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-12))


def _sum_of_shares(
    program: Program, terms: LossTerms, model: nn.Module, batch: dict[str, Tensor], micro: int
) -> Tensor:
    parts = [dict(zip(batch, t, strict=True)) for t in zip(*(v.split(micro) for v in batch.values()), strict=True)]
    count = terms.counts or (lambda *_: ())
    totals = dict.fromkeys(terms.denominators, torch.ones((), dtype=torch.float64))
    for _ in range(terms.levels):
        read = (*terms.count_inputs, *terms.denominators)
        counted = [count(*_values(program, model, part | totals, read)) for part in parts]
        sums = (torch.as_tensor(sum(column), dtype=torch.float64) for column in zip(*counted, strict=True))
        totals = dict(zip(terms.denominators, sums, strict=True))
    holders = [n.name for n in program.graph.graph.nodes if n.op == "placeholder"]
    losses = []
    for part in parts:
        losses.append(program.graph(*_values(program, model, part | totals, holders))[0])
    return torch.stack(losses).sum()


def _values(program: Program, model: nn.Module, given: dict[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    def value(name: str) -> Tensor:
        if name in program.parameters:
            return model.get_parameter(program.parameters[name])
        if name in program.buffers:
            return model.get_buffer(program.buffers[name])
        return program.constants[name] if name in program.constants else given[program.inputs.get(name, name)]

    return [value(name) for name in names]
