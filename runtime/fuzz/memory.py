"""Compare the planned memory with that of ranks, within the bound of a case.

parameters, gradients, optimizer    1 % or 64 bytes
activations, logits among them      3 % or 1 KiB: the size of a scalar or a row of statistics

Skipped if the plan does not predict bytes exactly: rows of experts depend on the routing, blocks of attention on the
documents, graphs have static memory, and the compiler chooses the saved tensors of compiled pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.memory.run import measured
from runtime.report.memory_rows import Compared

SLACK_BYTES = {"activations": 1024}
SMALLEST_SLACK = 64


def held(decided: Plan, batches: Sequence[dict[str, Tensor]], spec: Spec) -> list[Compared]:
    """The memory of this rank in a step, beside its row of the plan."""
    if not is_forecast(decided, spec):
        return []
    of_one_length = batches[:: len(decided.of_all_lengths)]  # from the greatest on
    return measured(decided, [of_one_length[0], of_one_length[-1]]).rows


def is_forecast(decided: Plan, spec: Spec) -> bool:
    is_exact = not decided.experts and not decided.to_run()[0].lowering.documents.attentions
    return spec.cuda_graphs.impl == "none" and not spec.compiles(on_gpu=False) and is_exact


def exceeds(row: Compared) -> bool:
    """Beyond the share that is allowed, and by more bytes than a small model's odds and ends."""
    slack = SLACK_BYTES.get(row.category, SMALLEST_SLACK)
    return not row.passed and abs(row.predicted - row.measured) > slack


def told(row: Compared) -> str:
    return f"rank {row.rank} holds {row.measured} bytes of {row.category}, the plan has {row.predicted}"
