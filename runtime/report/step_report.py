"""The figures of each step, and the warnings of the plan.

Values of a device tensor are copied into pinned memory in the queue, and the host waits for the event after the copy:
``tensor.tolist()`` would queue its copy only when it is called, behind the whole next step.

The rank for which others wait is found from the seconds that each rank works in the actions of a step. Ranks that share
a layer (tp, cp) wait inside its collectives, which count as work: they have one figure and are named together.
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

SLOWER = 2.0  # a slow rank takes this many times as long as the median of ranks with the same work
SLOWER_STAGE = 3.0  # or as the median of the other stages, if no replica has the same work


class PlanWarning(UserWarning):
    """Results may differ from one process, or ranks repeat work; ``plan.diagnostics`` has the details."""


def warn_of(plan: Plan, rank: int) -> None:
    """Issue a Python warning, on rank 0, for each distinct warning of the plan."""
    rows = {row.what: row for row in plan.diagnostics if row.level == "warning" and rank == 0}
    for row in rows.values():
        place, fix = f" (at {row.where})" if row.where else "", f"; {row.fix}" if row.fix else ""
        warnings.warn(f"{row.what}{place}{fix}", PlanWarning, stacklevel=4)


class StepClock:
    """Measures a step: the time between two events in the queue of the device, or the host's time on a CPU.

    ``num_tokens``: of the global batch.
    """

    num_tokens = 0

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._start, self._end = self._marks.now(), None

    def stop(self) -> None:
        self._end = self._marks.now()

    @property
    def seconds(self) -> float:
        """The duration of the step. Waits for the device if the step still runs."""
        assert self._end is not None, "the step has not ended"
        return self._marks.seconds(self._start, self._end)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a step's figures behind the norm, whether the update was skipped (0 or 1), and the loss.

    First the tokens of each expert of each of ``layers`` (block, number of experts), then the dropped tokens of each of
    ``dropping`` layers, last ``num_notes`` notes of ``runtime.distributed.messages``. ``drops``: whether tokens may be
    dropped; None: unknown. ``places``: (pp, dp) of each rank; ``pipelines``: the first rank of each rank's pipeline.
    """

    layers: Sequence[tuple[str, int]] = ()
    dropping: int = 0
    drops: bool | None = False
    num_notes: int = 0
    places: Sequence[tuple[int, int]] = ()
    pipelines: Sequence[int] = ()


class StepReport:
    """One update, the same on every rank. Reading the first figure waits for the device, once for all figures.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: of all parameters, before clipping.
    ``skipped``: the loss or a gradient was not finite, so nothing changed. ``seconds``: of the step, by this rank's
    clock; 0 if no batch was run, as is ``tokens_per_s``, which counts the first integer input of the global batch.
    ``expert_tokens``: block of each expert layer → tokens of the global batch for each expert, with dropped ones if
    experts have axes of their own. ``imbalance``: maximum over mean in the most uneven layer; 1 without experts.
    ``dropped_share``: fraction of expert choices without a slot; None if experts choose their tokens, or if slots are
    not counted. ``stop_requested``: a rank got a signal to end before this update
    (``runtime.distributed.stopping``). ``usual_seconds``: for each rank, the usual seconds of its actions without waits
    for other stages; 0 if unknown. ``slow_rank``: the ranks for which others wait, or None. ``bubble``: the fraction of
    time in which ranks wait for other stages, mean over ranks; on a GPU of a step or two before. ``memory_bytes``: peak
    of the fullest rank, on its GPU or resident in host memory. ``loss_scale``: in this step; None without one.
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
        """``figures``: on the device, described by ``contents``. ``check``: called with the notes when figures are
        read, and may raise. ``scale``: of the loss."""
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
        """Return the tokens on the fullest of ``ep`` ranks divided by the mean, in the most uneven layer."""
        ratios = [1.0]
        for tokens in self.expert_tokens.values():
            size = len(tokens) // ep
            of_ranks = [sum(tokens[first : first + size]) for first in range(0, len(tokens), size)]
            ratios.append(max(of_ranks) * ep / max(1, sum(tokens)))
        return max(ratios)

    @cached_property
    def told(self) -> Told:
        """The notes of all ranks."""
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
        """Whether tokens may be dropped, and dropped tokens are counted."""
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
        """Return the state to pickle: the figures, without device tensors."""
        return {
            "lr": self.lr,
            "_read": self._read,
            "_contents": self._contents,
            "loss_scale": self.loss_scale,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
        }


def bubble_of(told: Told, pipelines: Sequence[int]) -> float | None:
    """Return the fraction of a pipeline's run in which its ranks do not work, mean over ranks; None if unknown.

    The run is that of the first stage, which has the first forward and the last backward. ``pipelines``: for each rank,
    the rank with the first stage of its pipeline.
    """
    if not told.pipeline_seconds or not all(told.pipeline_seconds):
        return None
    shares = [w / told.pipeline_seconds[p] for w, p in zip(told.working_seconds, pipelines, strict=True)]
    return 1.0 - sum(shares) / len(shares)


class HostCopy:
    """Owns a copy of ``tensor`` in pinned memory, made when this object is; on a CPU the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        """Return the values, flat. Waits until the device has written them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()


@dataclass(frozen=True, slots=True)
class SlowRank:
    """``ranks`` work ``factor`` times as long in each step as ranks with the same work, ``seconds`` longer."""

    ranks: tuple[int, ...]
    factor: float
    seconds: float

    def __str__(self) -> str:
        named = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))} are"
        return f"{named} {self.factor:.1f}× slower: costs {self.seconds:.2g} s per step"


def slowest(working: Sequence[float], places: Sequence[tuple[int, int]]) -> SlowRank | None:
    """Return the ranks that delay the others most; None if all take similar times, or a figure is unknown (0).

    ``working``: seconds of each rank. ``places``: coordinates (pp, dp) of each rank. Replicas of one pipeline stage
    have the same work and are compared with each other. A stage without replicas is compared with all other stages,
    with a higher threshold, because their work differs.
    """
    if not working or not all(working):
        return None
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    seconds = {place: mean(working[rank] for rank in ranks) for place, ranks in members.items()}
    worst: dict[int, tuple[int, int]] = {}  # the slowest place of each stage
    for place in seconds:
        worst[place[0]] = max(worst.get(place[0], place), place, key=seconds.__getitem__)
    slow_ranks = [slow for place in worst.values() if (slow := _slow(place, members[place], seconds)) is not None]
    return max(slow_ranks, key=lambda slow: slow.seconds, default=None)


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
