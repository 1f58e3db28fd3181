"""Dropout on the device: its factor, its share of zeros, and masks that do not depend on the layout.

factor     sum of kept elements after / before = 1/(1 − p), to float32's rounding, in bfloat16 and float16 too
zeros      p, within five standard deviations
masks      the same for all tp ranks outside the parallel regions, each its own inside; the same whatever was
           drawn before, so whatever else the pp rank runs; others for each op, microbatch and step
"""

import torch
from torch import Tensor

from benchmarks.on_gpu.table import Table
from passes.ops.dropout import stream_dropout
from passes.ops.random_state import RandomState

P, FACTOR_LIMIT = 0.1, 1e-4


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("dropout", ("dtype", "factor / exact − 1", "zeros", "standard deviations from p", "masks"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        factor, zeros = factor_and_zeros(device, dtype, 2**18 if tiny else 2**26)
        deviations = abs(zeros[0] - P) / (P * (1 - P) / zeros[1]) ** 0.5
        wrong = wrong_masks(device, dtype)
        name = str(dtype).removeprefix("torch.")
        table.add(name, factor, zeros[0], deviations, "; ".join(wrong) or "as they should be")
        table.hold(f"{name}, factor", abs(factor), FACTOR_LIMIT)
        table.hold(f"{name}, zeros", deviations, 5.0)
        table.failed += [f"{name}, {what}" for what in wrong]
    return table


def factor_and_zeros(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, tuple[float, int]]:
    """How far the factor is from 1/(1 − p), in parts of it; the share of zeros, and of how many elements."""
    x = torch.rand(size, device=device).add_(1.0).to(dtype)  # of many values: their roundings cancel out
    y = stream_dropout(x, P, _state(), 17, False)
    kept = y != 0
    factor = y.double().sum() / x.double().masked_fill_(kept.logical_not(), 0.0).sum()
    return factor.item() * (1 - P) - 1, (1 - kept.double().mean().item(), size)


def wrong_masks(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The properties of the masks that are violated."""
    x = torch.ones(4096, device=device, dtype=dtype)

    def mask(state: RandomState, op: int = 17, sharded: bool = False) -> Tensor:
        return stream_dropout(x, P, state, op, sharded) != 0

    other = _state()
    for op, sharded in ((3, False), (99, True)):  # another stage, with other ops before
        mask(other, op, sharded)
    truth, own = mask(_state()), mask(_state(), sharded=True)
    same = {"tp ranks outside": mask(_state(tp_rank=1)), "after other draws": mask(other), "again": mask(_state())}
    differ = {
        "tp ranks inside": (own, mask(_state(tp_rank=1), sharded=True)),
        "ops": (truth, mask(_state(), 18)),
        "microbatches": (truth, mask(_state(microbatch=6))),
        "steps": (truth, mask(_state(step=4))),
    }
    wrong = [f"not the same: {what}" for what, found in same.items() if not torch.equal(found, truth)]
    return wrong + [f"the same: {what}" for what, (a, b) in differ.items() if torch.equal(a, b)]


def _state(tp_rank: int = 0, step: int = 3, microbatch: int = 5) -> RandomState:
    state = RandomState(1234, tp_rank)
    state.begin(step, microbatch)
    return state
