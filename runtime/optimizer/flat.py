"""Update rules on flat shards, parts of which may rest in a step: weights of experts without tokens, and weights that
only the model's own loss reads, if the step has another loss. They keep their values, moments and number of updates,
like a parameter with gradient None in torch.

    main       |     of all     | expert 3 | of all | expert 4 |
    count      |     the shard's        own            own     |

A kernel (runtime.optimizer.rules) does the arithmetic. Whether a part rests is known only on the device.
A rule of whole matrices has two kernels: between them the updates, which replace the gradients, are exchanged for their
orthogonal factors (runtime.optimizer.matrices).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from planner.spec.update_rules import PREFIX, arguments_of, class_of
from planner.updates import Settings
from runtime.optimizer.matrices import BucketExchange, orthogonalise
from runtime.optimizer.rules import AFTER_EXCHANGE, KERNELS, Kernel, Update
from runtime.optimizer.slots import between

OWN_LOSS = -1


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Elements start to stop of a shard, which belong to the parameter ``fqn``. It rests (is not updated) if all of the
    figures ``asked`` are zero; with OWN_LOSS among them also in a step with another loss than the model's.
    """

    fqn: str
    start: int
    stop: int
    asked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SettingsRun:
    """Elements start to stop of a shard, which have these settings."""

    start: int
    stop: int
    settings: Settings


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A flat ``main`` tensor, with its gradient in ``.grad``. ``moments``: the kinds of moments of its rule. ``parts``
    may rest, ``runs`` have their own settings: both in order and disjoint. ``exchange``: for a rule of matrices.
    """

    main: Tensor
    rule: str
    moments: tuple[str, ...]
    parts: tuple[ShardPart, ...] = ()
    runs: tuple[SettingsRun, ...] = ()
    exchange: BucketExchange | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Elements of shards that are updated together. ``count``: of their updates; ``rests``: 1 if nothing changes."""

    runs: Sequence[tuple[FlatShard, tuple[int, int]]]
    count: Tensor
    rests: Tensor


class FlatOptimizer:
    """The optimizer of flat shards. Owns their moments, ``state`` by main tensor, and one tensor of update counts: of
    all shards, then of each group of parts that rest together. All are allocated before the first step's activations.

    ``settings``: for all elements without their own. ``of_own_loss``: whether gradients are of the model's own loss.
    """

    def __init__(self, shards: Sequence[FlatShard], settings: Settings) -> None:
        self.shards, self.settings, self.of_own_loss = list(shards), settings, True
        self.state = {shard.main: {kind: torch.zeros_like(shard.main) for kind in shard.moments} for shard in shards}
        self._groups: dict[tuple[int, ...], list[tuple[FlatShard, ShardPart]]] = {}
        for shard in self.shards:
            for part in shard.parts:
                self._groups.setdefault(part.asked, []).append((shard, part))
        device = self.shards[0].main.device
        self._counts = torch.zeros(1 + len(self._groups), device=device)
        # copied to the device before the first step: the host waits for the copy
        counted = [[figure for figure in asked if figure != OWN_LOSS] for asked in self._groups]
        self._figures = [torch.tensor(figures, dtype=torch.int64, device=device) for figures in counted]

    def begin(self, updates: int = 0, updates_of: Mapping[str, int] | None = None) -> None:
        """Zero the moments and set the counts to ``updates``; ``updates_of``: by name, for other counts."""
        for state in self.state.values():
            for moment in state.values():
                moment.zero_()
        own = [(updates_of or {}).get(parts[0][1].fqn, updates) for parts in self._groups.values()]
        self._counts.copy_(torch.tensor([updates, *own]))

    def updates(self) -> tuple[int, dict[str, int]]:
        """Return the number of updates that were not skipped, and the numbers of parameters on this rank that may rest,
        by name. Waits for the device once.
        """
        updates, *own = map(int, self._counts.tolist())
        counts = dict(zip(self._groups, own, strict=True))
        return updates, {part.fqn: counts[part.asked] for shard in self.shards for part in shard.parts}

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | None, found_inf: Tensor, asked: Tensor | None) -> None:
        """Update; gradients are divided by ``grad_scale`` (float32), nothing changes if ``found_inf`` (float32) is 1.

        ``asked`` [figures]: the step's row counts, to which parts refer.
        """
        batches = list(self._batches(found_inf, asked))
        for batch in batches:
            self._run(batch, KERNELS, lr, grad_scale)
        self._counts.add_(1 - torch.stack([batch.rests for batch in batches]))
        exchanges = [
            (s.exchange, s.main.grad) for s in self.shards if s.exchange is not None and s.main.grad is not None
        ]
        if exchanges:
            orthogonalise(exchanges, self.settings.adjust_lr)
            for batch in batches:
                self._run(batch, AFTER_EXCHANGE, lr, None)

    def _batches(self, found_inf: Tensor, asked: Tensor | None) -> Iterator[_Batch]:
        """Yield the elements that never rest, then each group of parts that rest together."""
        runs = [
            (shard, run)
            for shard in self.shards
            for run in between(((part.start, part.stop) for part in shard.parts), len(shard.main))
        ]
        yield _Batch(runs, self._counts[0], found_inf)
        for number, (conditions, own) in enumerate(self._groups.items()):
            rests, figures = found_inf, self._figures[number]
            if len(figures):
                assert asked is not None, "experts that may get no tokens need the counts of the step"
                is_unasked = asked.index_select(0, figures).sum() == 0
                rests = torch.maximum(found_inf, is_unasked.to(found_inf.dtype))
            if OWN_LOSS in conditions and not self.of_own_loss:
                rests = torch.ones_like(found_inf)
            runs = [(shard, (part.start, part.stop)) for shard, part in own]
            yield _Batch(runs, self._counts[1 + number], rests)

    def _run(self, batch: _Batch, kernels: Mapping[str, Kernel], lr: float, grad_scale: Tensor | None) -> None:
        """Call a kernel once for all elements with equal settings, if there is one for their rule."""
        by_settings: dict[Settings, tuple[dict[str, list[Tensor]], list[Tensor]]] = {}
        for shard, within in batch.runs:
            assert shard.main.grad is not None, "a shard has a gradient"
            tensors = {"value": shard.main, "grad": shard.main.grad, **self.state[shard.main]}
            for start, stop, settings in self.settings_of(shard, *within):
                if kernel_of(settings.rule, kernels) is None:
                    continue
                columns, counts = by_settings.setdefault(settings, ({name: [] for name in tensors}, []))
                counts.append(batch.count.clone())
                for name, tensor in tensors.items():
                    columns[name].append(tensor[start:stop])
        for settings, (columns, counts) in by_settings.items():
            factor = settings.factor(self.settings)
            kernel = kernel_of(settings.rule, kernels)
            assert kernel is not None
            kernel(Update(settings, columns, counts, lr * factor, grad_scale, batch.rests))

    def settings_of(self, shard: FlatShard, start: int, stop: int) -> Iterator[tuple[int, int, Settings]]:
        """Yield (start, stop, settings) of the elements start to stop of a shard."""
        at, base = start, replace(self.settings, rule=shard.rule)
        for run in shard.runs:
            first, last = max(run.start, at), min(run.stop, stop)
            if first >= last:
                continue
            if at < first:
                yield at, first, base
            yield first, last, run.settings
            at = last
        if at < stop:
            yield at, stop, base


def kernel_of(rule: str, kernels: Mapping[str, Kernel]) -> Kernel | None:
    if rule.startswith(PREFIX):
        return torch_kernel if kernels is KERNELS else None
    return kernels.get(rule)


def torch_kernel(update: Update) -> None:
    """Update all tensors with a class of torch.optim. If the update is skipped, values and moments are restored."""
    s, columns, skips = update.settings, update.columns, update.found_inf.bool()
    kind: Any = class_of(s.rule)
    options: dict[str, Any] = arguments_of(s.rule, s.weight_decay, s.options)
    kept = {name: [x.clone() for x in column] for name, column in columns.items() if name != "grad"}
    values = columns["value"]
    if values[0].is_cuda and "capturable" in inspect.signature(kind).parameters:
        options["capturable"] = True  # the count stays on the device
    for value, grad in zip(values, columns["grad"], strict=True):
        value.grad = grad if update.grad_scale is None else grad / update.grad_scale.to(grad.dtype)
    optimizer = kind(values, lr=update.lr, **options)
    for index, (value, step) in enumerate(zip(values, update.steps, strict=True)):
        moments = {name: column[index] for name, column in columns.items() if name not in ("value", "grad")}
        optimizer.state[value] = {"step": step, **moments}
    optimizer.step()
    for name, before in kept.items():
        for now, then in zip(columns[name], before, strict=True):
            now.copy_(torch.where(skips, then, now))
