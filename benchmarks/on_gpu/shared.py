"""Two ranks on one GPU, which talk over gloo, train as one process does: tp 2 and dp 2; float32, no TF32.

Not pp 2: gloo sends host memory alone, so the ranks' meeting refuses stages that share a GPU.
"""

import torch

from benchmarks.on_gpu.equal import Run, compare, exact_products, steps
from benchmarks.on_gpu.models import planned, small
from benchmarks.on_gpu.table import Table
from runtime.distributed.launch import launch

LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2})
TIMEOUT_SECONDS = 150.0


def run(device: torch.device, *, tiny: bool = False) -> Table:
    exact_products()
    columns = ("model and layout", "loss", "gradients", "worst gradient", "parameters", "worst parameter")
    table = Table("shared", columns)
    for name in ("gpt2",) if tiny else ("gpt2", "llama"):
        truth = steps(planned(small(name)), device)
        for mesh in LAYOUTS:
            found = launch(rank_steps, 2, name, mesh, str(device), timeout_seconds=TIMEOUT_SECONDS)[0]
            compare(table, " ".join([name, *(f"{axis} {size}" for axis, size in mesh.items())]), found, truth)
    return table


def rank_steps(name: str, mesh: dict[str, int], device: str) -> Run:
    """The steps of each rank; the tensors are rank 0's."""
    exact_products()
    return steps(planned(small(name), mesh), device)
