"""Adafactor on shards: each parameter is updated as one process updates all of it (planner.spec.adafactor).

    squares of this rank's gradients   -- all-reduces -->   means of rows, of columns   ->  update, in their place
    squares of weights and updates     -- all-reduces -->   two sizes                   ->  weights

Each rank that shares a parameter keeps all means of its rows and columns. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.sharding.factored import Factored, FactoredPart, all_reduces
from planner.spec.adafactor import AdafactorOptions, adafactor_options
from planner.spec.update_rules import UPDATE_RULES
from planner.updates.groups import Settings
from runtime.optimizer.norm import squared_norm

KINDS = UPDATE_RULES["adafactor"].statistics
FactoredBucket = Sequence[tuple[Factored, tuple[FactoredPart, ...]]]  # its parameters, each with its parts in the shard
Moments = Callable[[Tensor], Mapping[str, Tensor]]
_EVERY_STEP = ()  # figures of a parameter that never rests


@dataclass(frozen=True, slots=True)
class FactoredParameter:
    """One parameter on this rank: its parts in a shard, and the means of its rows [.., a, 1] and columns [.., 1, b].

    ``asked``: it rests if all of these figures of a step are zero; () if it never does.
    """

    factored: Factored
    parts: tuple[FactoredPart, ...]
    shard: Tensor
    settings: Settings
    options: AdafactorOptions
    asked: tuple[int, ...]
    state: dict[str, Tensor]

    @property
    def grad(self) -> Tensor:
        assert self.shard.grad is not None, "a shard has a gradient"
        return self.shard.grad

    @property
    def least(self) -> float:
        """Of a root mean square."""
        eps, _ = self.options.eps
        return torch.finfo(self.shard.dtype).eps if eps is None else eps

    @property
    def num_elements(self) -> int:
        """Of the full parameter, over all ranks."""
        return prod(self.factored.local.global_shape)


class FactoredRule:
    """Owns the means of its parameters, and the counts of their updates. ``buckets``: by main shard.

    ``base``: settings of all parameters but those of ``own``; ``asked``: figures of those that may rest; ``groups``: by
    axis.
    """

    def __init__(
        self,
        buckets: Mapping[Tensor, FactoredBucket],
        base: Settings,
        own: Mapping[str, Settings],
        asked: Mapping[str, tuple[int, ...]],
        groups: Mapping[str, Any],
    ) -> None:
        self._base, self._shards, self._groups = base, list(buckets), groups
        options, self.parameters = adafactor_options(base.options), list[FactoredParameter]()
        for shard, bucket in buckets.items():
            for factored, parts in bucket:
                fqn, state = factored.local.fqn, _zeros(factored, shard)
                settings, rests = own.get(fqn, base), asked.get(fqn, _EVERY_STEP)
                self.parameters.append(FactoredParameter(factored, parts, shard, settings, options, rests, state))
        of_figures = {p.asked: p.shard.device for p in self.parameters}
        self._counts = {figures: torch.zeros((), device=device) for figures, device in of_figures.items()}
        self._figures = {figures: torch.tensor(figures, device=d) for figures, d in of_figures.items() if figures}

    def begin(self, updates: int, updates_of: Mapping[str, int]) -> None:
        """Means of zero and counts of ``updates``; ``updates_of`` by name, for parameters with other counts."""
        for p in self.parameters:
            self._counts[p.asked].fill_(updates_of.get(p.factored.local.fqn, updates))
            for mean in p.state.values():
                mean.zero_()

    @torch.no_grad()
    def step(
        self, lr: float, grad_scale: Tensor | None, found_inf: Tensor, asked: Tensor | None, moments: Moments
    ) -> None:
        """As FlatOptimizer.step; ``moments``: of a shard those of its elements."""
        rests = {figures: self._rests(figures, found_inf, asked) for figures in self._counts}
        if grad_scale is not None:
            divisor = torch.where(found_inf.bool(), 1.0, grad_scale)
            for shard in self._shards:
                assert shard.grad is not None, "a shard has a gradient"
                shard.grad.div_(divisor)
        squares = [_squares(p) for p in self.parameters]
        self._sum(squares, of_sizes=False)
        sizes = [own.new_zeros(2) for own in squares]
        for p, own, size in zip(self.parameters, squares, sizes, strict=True):
            count, skips = self._counts[p.asked] + 1, rests[p.asked].bool()
            _make_update(p, own, count, skips, size, moments(p.shard))
        self._sum(sizes, of_sizes=True)
        for p, size in zip(self.parameters, sizes, strict=True):
            _apply(p, lr * p.settings.factor(self._base), size, self._counts[p.asked] + 1, rests[p.asked].bool())
        for figures, count in self._counts.items():
            count.add_(1 - rests[figures])

    def _rests(self, figures: tuple[int, ...], found_inf: Tensor, asked: Tensor | None) -> Tensor:
        if not figures:
            return found_inf
        assert asked is not None, "experts that may get no tokens need the counts of the step"
        is_unasked = asked.index_select(0, self._figures[figures]).sum() == 0
        return torch.maximum(found_inf, is_unasked.to(found_inf.dtype))

    def _sum(self, values: Sequence[Tensor], *, of_sizes: bool) -> None:
        """In place, over the ranks that have other parts of a parameter."""
        for axis, members in all_reduces([p.factored for p in self.parameters], of_sizes=of_sizes):
            packed = torch.cat([values[number] for number in members])
            dist.all_reduce(packed, group=self._groups[axis])
            for number, total in zip(members, packed.split([len(values[n]) for n in members]), strict=True):
                values[number].copy_(total)


def _zeros(factored: Factored, shard: Tensor) -> dict[str, Tensor]:
    if not factored.is_matrix:
        return {}
    return {kind: shard.new_zeros(box.shape) for kind, box in zip(KINDS, factored.boxes, strict=True)}


def _squares(p: FactoredParameter) -> Tensor:
    """Sums of squares of this rank's gradients along each row, then along each column; flat, float64."""
    found = p.shard.new_zeros(p.factored.num_statistics, dtype=torch.float64)
    if p.factored.is_matrix:
        rows, columns = _rows_and_columns(p.factored, found)
        for part, grad in _views(p, p.grad):
            if part.is_counted:
                squares = grad.square()
                rows[_rows_of(part)] += squares.sum(-1, keepdim=True)
                columns[_columns_of(part)] += squares.sum(-2, keepdim=True)
    return found


def _make_update(
    p: FactoredParameter, squares: Tensor, count: Tensor, skips: Tensor, sizes: Tensor, moments: Mapping[str, Tensor]
) -> None:
    """The update takes the place of the gradient. ``sizes`` [2] gets the squares of this rank's weights and update."""
    share = count.double().pow(p.options.beta2_decay).to(p.shard.dtype)
    estimate = (
        _of_rows_and_columns(p, squares, share, skips)
        if p.factored.is_matrix
        else _of_elements(p, share, skips, moments)
    )
    for (part, grad), (_, weights), mean_square in zip(_views(p, p.grad), _views(p, p.shard), estimate, strict=True):
        update = mean_square.clamp_(min=p.least * p.least).rsqrt_().mul_(grad)
        if part.is_counted:
            sizes[0] += squared_norm(weights.reshape(-1))
            sizes[1] += squared_norm(update.reshape(-1))
        grad.copy_(update)


def _of_rows_and_columns(p: FactoredParameter, squares: Tensor, share: Tensor, skips: Tensor) -> Iterator[Tensor]:
    """The mean square of each element, part by part."""
    means = []
    for kind, total, length in zip(KINDS, _rows_and_columns(p.factored, squares), (-1, -2), strict=True):
        before = p.state[kind]
        mean = before.lerp((total / p.factored.whole.shape[length]).to(before.dtype), share)
        before.copy_(torch.where(skips, before, mean))
        means.append(mean)
    rows, columns = means
    overall = rows.mean(-2, keepdim=True).clamp_(min=p.least)
    for part in p.parts:
        found = rows[_rows_of(part)] * columns[_columns_of(part)]
        yield found.div_(overall[part.place[:-2]])


def _of_elements(p: FactoredParameter, share: Tensor, skips: Tensor, moments: Mapping[str, Tensor]) -> Iterator[Tensor]:
    (kind,) = UPDATE_RULES["adafactor"].moments
    for (_, before), (_, grad) in zip(_views(p, moments[kind]), _views(p, p.grad), strict=True):
        mean = before.lerp(grad.square(), share)
        before.copy_(torch.where(skips, before, mean))
        yield mean


def _apply(p: FactoredParameter, lr: float, sizes: Tensor, count: Tensor, skips: Tensor) -> None:
    """The step is relative to the size of the parameter, and no longer than for an update of size ``d``."""
    _, least = p.options.eps
    of_weights, of_update = (sizes / p.num_elements).sqrt().unbind()
    rate = of_weights.clamp(min=least) * count.double().rsqrt().clamp(max=lr)
    rate = rate / (of_update / p.options.d).clamp(min=1.0)
    rate = (rate if p.options.maximize else -rate).to(p.shard.dtype)
    for (_, weights), (_, update) in zip(_views(p, p.shard), _views(p, p.grad), strict=True):
        changed = (weights * (1 - lr * p.settings.weight_decay)).add_(update * rate)
        weights.copy_(torch.where(skips, weights, changed))


def _views(p: FactoredParameter, flat: Tensor) -> Iterator[tuple[FactoredPart, Tensor]]:
    for part in p.parts:
        yield part, flat[part.start : part.stop].view(part.shape)[part.inner]


def _rows_and_columns(factored: Factored, flat: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (box.shape for box in factored.boxes)
    return flat[: prod(rows)].view(rows), flat[prod(rows) :].view(columns)


def _rows_of(part: FactoredPart) -> tuple[slice, ...]:
    return (*part.place[:-1], slice(None))


def _columns_of(part: FactoredPart) -> tuple[slice, ...]:
    return (*part.place[:-2], slice(None), part.place[-1])
