"""Output of a run: the figures of each step, after the warnings of the plan.

Values of a device tensor are copied into pinned memory in the queue, and the host waits for the event behind them:
``tensor.tolist()`` would queue its copy when it is called, behind all of the next step.

The rank that the others wait for is found from the seconds that each rank works in the actions of a step. Ranks that
share a layer (tp, cp) wait inside of its collectives, which count as work: they have one figure and are named together.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median_low
from typing import Any

import torch
from torch import Tensor

from planner.frozen_plan import Plan
from runtime.distributed.marks import Marks
from runtime.distributed.messages import Told

SLOWER = 2.0  # than the median of those with the same work, to be named
SLOWER_STAGE = 3.0  # than the median of the other stages, if no replica has the same work


class PlanWarning(UserWarning):
    """Numbers can differ from those of one process, or ranks repeat work; ``plan.diagnostics`` says more."""


def warn_of(plan: Plan, rank: int) -> None:
    """On rank 0: one Python warning for each thing that the plan warns of, for any number of layers."""
    rows = {row.what: row for row in plan.diagnostics if row.level == "warning" and rank == 0}
    for row in rows.values():
        place, fix = f" (at {row.where})" if row.where else "", f"; {row.fix}" if row.fix else ""
        warnings.warn(f"{row.what}{place}{fix}", PlanWarning, stacklevel=4)


class StepClock:
    """How long the device worked on a step: the time between two events in its queue, or the host's on a CPU.

    ``num_tokens``: of the step's global batch.
    """

    num_tokens = 0

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._start, self._end = self._marks.now(), None

    def stop(self) -> None:
        self._end = self._marks.now()

    @property
    def seconds(self) -> float:
        """Waits for the device if the step still runs."""
        assert self._end is not None, "the step has not ended"
        return self._marks.seconds(self._start, self._end)


@dataclass(frozen=True, slots=True)
class Contents:
    """The figures of a step after norm, whether the update was skipped (0 or 1), and loss.

    First the tokens of each expert of each of ``layers`` (block, experts), then how many were dropped of each of
    ``dropping`` layers that count it, last ``num_notes`` of ``runtime.distributed.messages``. ``drops``: whether a
    token may find no slot; None: unknown. Of each rank, ``places``: its (pp, dp); ``pipelines``: the first rank of its
    pipeline.
    """

    layers: Sequence[tuple[str, int]] = ()
    dropping: int = 0
    drops: bool | None = False
    num_notes: int = 0
    places: Sequence[tuple[int, int]] = ()
    pipelines: Sequence[int] = ()


class StepReport:
    """One update, the same on every rank. The first figure that is read waits for the device, once for all of them.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: of all parameters, before clipping.
    ``skipped``: the loss or a gradient was not finite, so nothing changed. ``seconds``: of the step, by this rank's
    clock; 0 if no batch was run, and ``tokens_per_s`` then: of the first integer input of the global batch.
    ``expert_tokens``: of each layer of experts, by its block, how many tokens of the global batch each expert got;
    if experts have axes of their own, dropped ones included. ``imbalance``: the most over the mean,
    in the layer with the largest ratio; 1 if all are alike or there are none. ``dropped_share``: of all choices of
    tokens those that found no slot; None if a layer's slots are filled in a way that is not understood, or by the
    experts' own choice, or no experts are counted. ``stop_requested``: some rank got a signal to end before
    this update (``runtime.distributed.stopping``). ``usual_seconds``: of each rank, seconds of a usual run over its
    actions without waits for other stages; 0 if unknown yet. ``slow_rank``: the ranks that the
    others wait for, if any. ``bubble``: the share of the pipeline's run in which ranks wait for other
    stages, mean over them; on a GPU of a step or two before. ``memory_bytes``: the most that a rank has held so far, of
    its GPU, or resident in the host's memory. ``loss_scale``: that the step ran with. None if there is no such.
    """

    def __init__(
        self,
        figures: Tensor,
        lr: float,
        clock: StepClock | None = None,
        contents: Contents = Contents(),
        check: Callable[[list[float]], None] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """``figures``: on the device; ``contents`` says which. ``check``: gets the notes when figures are read, which
        raises its errors. ``scale``: of the loss."""
        self.lr = lr
        self._figures, self._contents, self._check = HostCopy(figures), contents, check
        self._clock = clock
        self._scale = None if scale is None else HostCopy(scale)

    @cached_property
    def _read(self) -> tuple[float, float, float, list[float]]:
        norm, skipped, loss, *rest = self._figures.numbers()
        if self._check is not None:
            self._check(rest[-self._contents.num_notes :])
        return loss, norm, skipped, rest

    @cached_property
    def expert_tokens(self) -> dict[str, list[int]]:
        rows = iter(self._read[3])
        found: dict[str, list[int]] = {}
        for block, size in self._contents.layers:
            name = block if block not in found else f"{block} #{sum(n.startswith(block) for n in found) + 1}"
            found[name] = [int(n) for _, n in zip(range(size), rows, strict=False)]
        return found

    @property
    def imbalance(self) -> float:
        return max((max(n) * len(n) / sum(n) for n in self.expert_tokens.values() if sum(n)), default=1.0)

    def imbalance_of_ranks(self, ep: int) -> float:
        """Tokens of the experts of one rank of ``ep`` over the mean: the most of any, in any layer."""
        found = [1.0]
        for tokens in self.expert_tokens.values():
            size = len(tokens) // ep
            of_ranks = [sum(tokens[first : first + size]) for first in range(0, len(tokens), size)]
            found.append(max(of_ranks) * ep / max(1, sum(tokens)))
        return max(found)

    @cached_property
    def told(self) -> Told:
        """Values from all ranks."""
        num_notes = self._contents.num_notes
        return Told.of(self._read[3][-num_notes:] if num_notes else [])

    @property
    def stop_requested(self) -> bool:
        return self.told.stop_requested

    @property
    def has_orders(self) -> bool:
        """Whether rank 0 has orders for all ranks (``runtime.training.showing``)."""
        return self.told.has_orders

    @property
    def usual_seconds(self) -> list[float]:
        return [*self.told.usual_seconds]

    @property
    def slow_rank(self) -> SlowRank | None:
        return slowest(self.usual_seconds, self._contents.places)

    @property
    def bubble(self) -> float | None:
        return bubble_of(self.told, self._contents.pipelines)

    @property
    def memory_bytes(self) -> int | None:
        return int(max(self.told.memory_bytes, default=0)) or None

    @cached_property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.numbers()[0]

    @property
    def dropped_share(self) -> float | None:
        contents = self._contents
        if contents.drops is None or not contents.layers:
            return None
        num_experts = sum(size for _, size in contents.layers)
        chosen, rest = self._read[3][:num_experts], self._read[3][num_experts:]
        return sum(rest[: contents.dropping]) / max(sum(chosen), 1.0)

    @property
    def drops(self) -> bool:
        """Whether there are slots that a token may not find, and it is known how many do not."""
        return bool(self._contents.drops)

    @property
    def loss(self) -> float:
        return self._read[0]

    @property
    def grad_norm(self) -> float:
        return self._read[1]

    @property
    def skipped(self) -> bool:
        return bool(self._read[2])

    @cached_property
    def seconds(self) -> float:
        return self._clock.seconds if self._clock is not None else 0.0

    @cached_property
    def tokens_per_s(self) -> float:
        return self._clock.num_tokens / self.seconds if self._clock is not None else 0.0

    def __repr__(self) -> str:
        fields = ("loss", "grad_norm", "lr", "skipped", "tokens_per_s")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    def __getstate__(self) -> dict[str, Any]:
        """Whoever gets it pickled, in another process, has the figures."""
        return {
            "lr": self.lr,
            "_read": self._read,
            "_contents": self._contents,
            "loss_scale": self.loss_scale,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
        }


def bubble_of(told: Told, pipelines: Sequence[int]) -> float | None:
    """The share of a pipeline's run in which its ranks do not work, mean over all; None if a rank does not know.

    The run is that of the first stage: it makes the first forward, and the last backward. ``pipelines``: of each rank,
    the rank of its pipeline that has the first stage.
    """
    if not told.pipeline_seconds or not all(told.pipeline_seconds):
        return None
    shares = [w / told.pipeline_seconds[p] for w, p in zip(told.working_seconds, pipelines, strict=True)]
    return 1.0 - sum(shares) / len(shares)


class HostCopy:
    """Owns: pinned memory with the values that ``tensor`` had when this was made; on a CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        """The values, flat; waits for the device until it has written them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()


@dataclass(frozen=True, slots=True)
class SlowRank:
    """``ranks`` work ``factor`` times as long in each step as others with their work: ``seconds`` more."""

    ranks: tuple[int, ...]
    factor: float
    seconds: float

    def __str__(self) -> str:
        named = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))} are"
        return f"{named} {self.factor:.1f}× slower: costs {self.seconds:.2g} s per step"


def slowest(working: Sequence[float], places: Sequence[tuple[int, int]]) -> SlowRank | None:
    """The ranks that cost the others most; None if all are about alike, or a figure is unknown (0).

    ``working``: seconds of each rank. ``places``: coordinates (pp, dp) of each rank. Replicas of one pipeline stage
    have the same work and are compared with each other. A stage without replicas is compared with all other stages,
    which differ by nature, so there the threshold is higher.
    """
    if not working or not all(working):
        return None
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    seconds = {place: mean(working[rank] for rank in ranks) for place, ranks in members.items()}
    worst: dict[int, tuple[int, int]] = {}  # of each stage: what the others are compared with is no less
    for place in seconds:
        worst[place[0]] = max(worst.get(place[0], place), place, key=seconds.__getitem__)
    found = [slow for place in worst.values() if (slow := _slow(place, members[place], seconds)) is not None]
    return max(found, key=lambda slow: slow.seconds, default=None)


def _slow(place: tuple[int, int], ranks: list[int], seconds: dict[tuple[int, int], float]) -> SlowRank | None:
    others = {other: spent for other, spent in seconds.items() if other != place}
    if not others:
        return None
    replicas = [spent for (stage, _), spent in others.items() if stage == place[0]]
    usual = median_low(replicas or others.values())
    factor = seconds[place] / usual
    if factor < (SLOWER if replicas else SLOWER_STAGE):
        return None
    return SlowRank(tuple(ranks), factor, seconds[place] - usual)
