"""What each of the four gloo ranks of test_zero1.py runs: every case on the same four."""

import itertools
import warnings

import torch
import torch.distributed as dist
from torch import nn

from passes.parameters import LocalParameter
from passes.types.types import I
from planner.sharding.buffers import BufferOptions, buffers_of_rank
from planner.spec.optimizer import OptimizerSpec
from runtime.optimizer.zero1 import DistributedOptimizer
from tests.tools.ranks import Ranks

WORLD, STEPS, ROWS, MICROBATCHES = 4, 4, 8, 2
PRECISIONS = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
CASES = list(itertools.product(PRECISIONS, (2, 4), (0, 1), ("none", "nccl"), (None, 40)))


class Toy(nn.Module):
    """Odd sizes, a linear that is applied twice, a weight read transposed, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.ones(7))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Parameter(torch.randn(7, 3) / 3)

    def forward(self, x, on_hidden_grad=None):
        hidden = self.first(x)
        if on_hidden_grad is not None:
            hidden.register_hook(on_hidden_grad)
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden)))) * self.scale
        return ((hidden @ self.head) ** 2).sum() / ROWS


def make_model(dtype):
    torch.manual_seed(3)
    return Toy().to(dtype)


def make_batch(step, dtype):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def rate(step):
    return 1e-2 / (step + 1)


def settings(**changes):
    return OptimizerSpec(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=0.7, **changes)


def local_parameters(model):
    return [(LocalParameter(fqn, tuple(p.shape), p.dtype, I, tuple(p.shape)), p) for fqn, p in model.named_parameters()]


def optimizer_of(parameters, options, gradients=None, groups=None):
    """An optimizer over the buffers that the planner lays out for these parameters."""
    shared = {axis: (groups or {}).get(axis) for axis in ("dp", "edp")}
    sizes = {axis: dist.get_world_size(group) if group is not None else 1 for axis, group in shared.items()}
    planned = buffers_of_rank(0, [local for local, _ in parameters], BufferOptions(options, sizes, gradients))
    return DistributedOptimizer(parameters, planned, options, groups=groups)


def run_case(precision, zero, alignment, bucket_size, groups, dp, dp_rank):
    dtype = getattr(torch, precision[0])
    model = make_model(dtype)
    options = settings(zero=zero, alignment=alignment, bucket_size=bucket_size)
    optimizer = optimizer_of(local_parameters(model), options, precision[1], groups)
    buffers, steps = optimizer.buffers, []
    for step in range(STEPS):
        launched = []
        optimizer.begin_step()
        optimizer.wait_parameters()
        for m, rows in enumerate(make_batch(step, dtype).chunk(dp)[dp_rank].chunk(MICROBATCHES)):
            buffers.last_microbatch = m == MICROBATCHES - 1
            model(rows, lambda _, seen=launched: seen.append(list(buffers.launches))).backward()
        optimizer.reduce_gradients()
        gradients = optimizer.gather_gradients()
        result = optimizer.step(rate(step), extra=(1.0, dp_rank))
        optimizer.wait_parameters()
        steps.append(
            {
                "gradients": gradients,
                "norm": float(result.figures[0]),
                "sums": tuple(result.figures[2:].tolist()),
                "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
                "launched_before_first": launched[-1],
                "launches": buffers.launches,
            }
        )
    layout = [buffer.layout for buffer in buffers.buffers]
    return {"steps": steps, "bytes": optimizer.measured_bytes(), "layouts": layout}


def run_not_finite(groups, dp_rank):
    """Only one rank sees an infinite gradient."""
    model = make_model(torch.float32)
    optimizer = optimizer_of(local_parameters(model), settings(), groups=groups)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.buffers.last_microbatch = True
    (model(make_batch(0, torch.float32)) * (float("inf") if dp_rank == 1 else 1.0)).backward()
    result = optimizer.step(1e-2)
    optimizer.wait_parameters()
    return {
        "skipped": bool(result.figures[1]),
        "unchanged": all(torch.equal(before[n], p) for n, p in model.named_parameters()),
    }


def on_ranks(host, chosen):
    return Ranks(WORLD, "forks", host).run(run_cases, chosen)


def run_cases(chosen):
    """The results of this rank, by case."""
    warnings.simplefilter("error", FutureWarning)
    rank, results = dist.get_rank(), {}
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dp_pair = pairs[rank // 2]
    groups = {2: {"dp": dp_pair, "world": dp_pair}, 4: {"dp": dist.group.WORLD, "world": dist.group.WORLD}}
    for case in [case for case in CASES if case in chosen]:
        precision, dp, zero, alignment, bucket_size = case
        results[case] = run_case(precision, zero, alignment, bucket_size, groups[dp], dp, rank % dp)
    results["not_finite"] = run_not_finite(groups[4], rank)
    return results
