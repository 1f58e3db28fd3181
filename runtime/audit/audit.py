"""Audits a running plan: every N steps, the engine's loss of one microbatch is compared with the user's own module.

    engine      its loss of a global batch that repeats this microbatch, with the weights of the step
    module      its loss of this microbatch; if the loss grows with the batch (a sum), of the repeated batch

The losses differ if the forward does something that the capture did not see, such as another path in every tenth call.
Dropout is off on both sides; a forward that draws other random numbers cannot be audited and is refused.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError, RunError
from passes.program.ops.aten import aten, is_random, packet_of
from passes.program.ops.sequence import causal_attention
from passes.program.source_lines import where_of
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from planner.tables.sizes import format_bytes
from runtime.audit.own_module import OwnModule, Tolerance
from runtime.data.batches import BatchLayout
from runtime.distributed.agreement import agreed, broadcast_json, of_kind
from runtime.distributed.groups import Groups

Batch = Mapping[str, Tensor]
_DROPOUTS = {aten.dropout, aten.scaled_dot_product_attention, causal_attention}


class AuditError(RunError):
    """Raised on every rank if the engine's loss of a microbatch differs from that of the user's module."""


class AuditWarning(UserWarning):
    """Warning of such a difference, with `audit.on_difference: warn`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One microbatch. ``index``: its number in its batch; ``num_copies``: copies that make a global batch."""

    index: int
    rows: dict[str, Tensor]
    num_copies: int

    @property
    def repeated(self) -> dict[str, Tensor]:
        return {name: value.repeat(self.num_copies, *[1] * (value.ndim - 1)) for name, value in self.rows.items()}


class Audit:
    """The audits of a run. Rank 0 keeps the user's module in host memory as long as the engine lives.

    Every rank creates it before the model is released. Raises PlanError on every rank if the model cannot be audited.
    """

    def __init__(self, plan: Plan, spec: Spec, groups: Groups) -> None:
        assert spec.audit.every is not None
        self._asked, self._groups, self._every = spec.audit, groups, spec.audit.every
        self._bytes = gathered_bytes(plan)
        self._module: OwnModule | None = None
        self._is_sum: bool | None = None  # whether the loss grows with the batch, once that is known
        with agreed(groups):
            if groups.rank == 0:
                check_audit(plan)
                model = plan.model
                assert model is not None, "the model was released before its audit was set up"
                self._module = OwnModule(model, spec)

    def is_due(self, step_index: int) -> bool:
        return (step_index + 1) % self._every == 0

    def sample(self, batch: Batch, layout: BatchLayout, step_index: int, *, local: bool) -> Sample:
        """Return the microbatch to audit, the same on every rank, another one at each audit. ``local``: the batch has
        the rows of one dp rank only; the microbatch is then one of rank 0."""
        num_copies = layout.global_size // layout.micro
        count = layout.num_microbatches if local else num_copies
        index = ((step_index + 1) // self._every - 1) % count
        rows = {name: value[index * layout.micro : (index + 1) * layout.micro] for name, value in batch.items()}
        return Sample(index, self._of_rank_0(rows) if local else rows, num_copies)

    def check_memory(self) -> None:
        """Raise PlanError on every rank if the host lacks memory for the weights; called before they are gathered."""
        with agreed(self._groups):
            if self._groups.rank == 0:
                refuse_too_large(self._bytes, available_bytes())

    def compare(
        self, sample: Sample, layout: BatchLayout, loss: float, weights: Mapping[str, Tensor], buffers: Batch
    ) -> tuple[float, float]:
        """Return the loss of the user's module and the allowed relative difference, the same on every rank.

        ``loss``: of the engine; ``weights`` and ``buffers``: full tensors, on rank 0. Raises PlanError on every rank if
        the module fails.
        """
        own = None
        with agreed(self._groups, rank_0_is_long=True):
            if self._module is not None:
                # on the CPU, in the dtypes in which the engine computes
                rows = {n: value.cpu().to(layout.computed.get(n, value.dtype)) for n, value in sample.rows.items()}
                own = self._own(self._module, replace(sample, rows=rows), loss, weights, buffers)
        return broadcast_json(self._groups, own, of_kind(tuple[float, float]))

    def judge(self, step_index: int, sample: Sample, loss: float, own: float, allowed: float) -> None:
        """Raise AuditError on every rank, or warn on rank 0 (``audit.on_difference``), if the losses differ."""
        if is_equal(loss, own, allowed):
            return
        size = len(next(iter(sample.rows.values())))
        text = (
            f"audit of step {step_index + 1}: the engine has loss {loss:.9g}, your module has {own:.9g}, for "
            f"microbatch {sample.index} ({size} sequences); the allowed relative difference is {allowed:.1e}\n  "
            "fix: the forward no longer computes what was captured: find the Python state that it keeps between calls, "
            "and pass it as an input; `meshwright verify` shows whether the plan is wrong"
        )
        if self._asked.on_difference == "stop":
            raise AuditError(text)
        if self._groups.rank == 0:
            warnings.warn(text, AuditWarning, stacklevel=4)

    # ---- on rank 0

    def _own(
        self, module: OwnModule, sample: Sample, loss: float, weights: Mapping[str, Tensor], buffers: Batch
    ) -> tuple[float, float]:
        with module.holding(weights, buffers):
            own = module.loss(sample.repeated if self._is_sum else sample.rows)
            if self._is_sum is None and sample.num_copies > 1:
                if is_equal(loss, own, self._allowed(module).loss):
                    self._is_sum = False
                elif self._grows(module, sample, own):
                    self._is_sum, own = True, module.loss(sample.repeated)
        return own, self._allowed(module).of_loss(own)

    def _grows(self, module: OwnModule, sample: Sample, own: float) -> bool:
        """Return whether repeating the sequences changes the loss, while running them once gives ``own`` again."""
        twice = module.loss(Sample(sample.index, sample.rows, 2).repeated)
        return module.loss(sample.rows) == own and not is_equal(twice, own, self._allowed(module).loss)

    def _allowed(self, module: OwnModule) -> Tolerance:
        return Tolerance.of(module.precision, 0.0, self._asked.tolerance)

    def _of_rank_0(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._groups.host is None:
            return rows
        copies = {name: value.cpu().clone() for name, value in rows.items()}
        for value in copies.values():  # in the order of the batch, which was checked
            dist.broadcast(value.view(-1).view(torch.uint8), 0, group=self._groups.host)
        return copies


def is_equal(loss: float, own: float, allowed: float) -> bool:
    """Return whether losses agree within ``allowed``; equal if both are NaN, as for a microbatch without labels."""
    if not (math.isfinite(loss) and math.isfinite(own)):
        return loss == own or (math.isnan(loss) and math.isnan(own))
    return abs(loss - own) <= allowed * abs(own)


def check_audit(plan: Plan) -> None:
    """Raise PlanError if no audit can be made on this host, with the reason."""
    refuse_draws(plan.to_run()[0])
    refuse_too_large(gathered_bytes(plan), available_bytes())


def gathered_bytes(plan: Plan) -> int:
    """Return the bytes of all weights as full tensors."""
    return sum(math.prod(row.shape) * getattr(torch, row.dtype).itemsize for row in plan.parameters)


def refuse_too_large(num_bytes: int, available: int | None) -> None:
    """Raise PlanError if the weights do not fit into the ``available`` bytes of the host (None: unknown)."""
    if available is not None and num_bytes > available:
        raise PlanError(
            f"audit: gathering the weights takes {format_bytes(num_bytes)} of memory on the host of rank 0, which has "
            f"{format_bytes(available)} left",
            where="audit",
            fix="remove audit, give rank 0 a host with more memory, or audit a smaller model of the same code",
        )


def refuse_draws(decisions: Decisions) -> None:
    """Raise PlanError at the line of random numbers other than dropout, which cannot be turned off."""
    for node in decisions.program.graph.graph.nodes:
        if node.op == "call_function" and is_random(node) and packet_of(node.target) not in _DROPOUTS:
            what = f"audit: the forward draws random numbers ({node.target}), which would differ in eager mode"
            fix = "remove audit, or draw the numbers outside the forward and pass them as an input"
            raise PlanError(what, where=where_of(node), fix=fix)


def available_bytes() -> int | None:
    """Return the host memory that a process can still allocate, within its container too; None if unknown."""
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system
        return None
    of_host = int(line.split()[1]) << 10
    try:
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or no limit
        return of_host
    return min(of_host, max(0, limit - used))
