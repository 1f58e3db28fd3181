"""A program cut over cp, run for all its ranks in one process: each call on the tensors of one rank after another.

What ranks exchange is then plain torch over the list of their tensors, so that autograd of the sum of their losses is
the proof of every gradient: nothing is trusted but the calls themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.moe.find import find_experts
from passes.partition.loss.shares import LossTerms
from passes.partition.sequence.cut import cut_sequence
from passes.program.ops.sequence import causal_attention, gather_sequence, local_rows, sum_over_ranks
from passes.program.program import Program

Ranks = list[Any]


def places(size: int, rank: int, cp: int) -> Tensor:
    """Where a rank's tokens stand among all: chunk r and chunk 2·cp − 1 − r."""
    chunks = torch.arange(size).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def _local_rows(cp: int, x: Ranks, dim: int) -> Ranks:
    return [x[r].index_select(dim, places(x[r].shape[dim], r, cp)) for r in range(cp)]


def _gather(cp: int, x: Ranks, dim: int) -> Ranks:
    order = torch.cat([places(cp * x[0].shape[dim], r, cp) for r in range(cp)]).argsort()
    return [torch.cat(x, dim).index_select(dim, order)] * cp


def _sum(cp: int, x: Ranks) -> Ranks:
    return [torch.stack(x).sum(0)] * cp


def _causal(cp: int, q: Ranks, k: Ranks, v: Ranks, **options: Any) -> Ranks:
    found = []
    for r in range(cp):
        rows, keys = places(k[r].shape[-2], r, cp), torch.arange(k[r].shape[-2])
        mask = keys <= rows.unsqueeze(1)
        found.append(torch.nn.functional.scaled_dot_product_attention(q[r], k[r], v[r], mask, **options))
    return found


MEETINGS: dict[Any, Callable[..., Ranks]] = {local_rows: _local_rows, gather_sequence: _gather, sum_over_ranks: _sum}


def run(program: Program, values: Mapping[str, Tensor], cp: int = 1) -> Tensor:
    """The sum of all ranks' losses; ``values``: of each placeholder, the same on every rank."""
    env: dict[fx.Node, Ranks] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = [values.get(node.name)] * cp
        elif node.op == "call_function":
            env[node] = _call(node, env, cp)
        elif node.op == "output":
            return torch.stack(env[node.args[0][0]]).sum()
    raise AssertionError("no output")


def _call(node: fx.Node, env: Mapping[fx.Node, Ranks], cp: int) -> Ranks:
    if node.target in MEETINGS:
        return MEETINGS[node.target](cp, env[node.args[0]], *node.args[1:-1])  # pyright: ignore
    if node.target is causal_attention:
        return _causal(cp, *(env[n] for n in node.args[:3]), **node.kwargs)  # pyright: ignore
    found = []
    for rank in range(cp):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n, r=rank: env[n][r])
        found.append(node.target(*args, **kwargs))  # pyright: ignore
    shapes = [tuple(t.shape) for t in (found[0] if isinstance(found[0], (tuple, list)) else [found[0]])]
    val = node.meta["val"]
    assert shapes == [tuple(t.shape) for t in (val if isinstance(val, (tuple, list)) else [val])], node
    return found


# ---- a model, whole and cut


class Worst(dict[str, float]):
    """Largest difference of the loss ("loss") and of each gradient, relative to the largest element."""


def values_of(program: Program, model: nn.Module, batch: Mapping[str, Tensor], terms: LossTerms) -> dict[str, Tensor]:
    """What each placeholder holds: weights that want gradients, buffers, constants, the batch, and its counts."""
    held = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))}
    values = {name: held[fqn].clone().requires_grad_() for name, fqn in program.parameters.items()}
    values |= {name: held[fqn] for name, fqn in program.buffers.items() if fqn in held}
    values |= program.constants | {name: batch[key] for name, key in program.inputs.items()}
    if terms.counts is not None:
        assert terms.levels == 1
        totals = torch.ones(len(terms.denominators), dtype=torch.float64)
        counts = terms.counts(*(values[name] for name in terms.count_inputs), *totals)
        values |= {n: torch.as_tensor(c).double() for n, c in zip(terms.denominators, counts, strict=True)}
    return values


def compared(program: Program, terms: LossTerms, model: nn.Module, batch: Mapping[str, Tensor], cp: int) -> Worst:
    """Cut ``program`` in place, and hold its loss and gradients on all ranks against those of before."""
    values = values_of(program, model, batch, terms)
    names = list(program.parameters)

    def found(size: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = run(program, values, size)
        leaves = [values[n] for n in names]
        return loss.detach(), torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    loss, gradients = found(1)
    cut_sequence(program, cp, find_experts(program))
    cut_loss, cut_gradients = found(cp)
    worst = Worst(loss=_apart(loss, cut_loss))
    for name, one, other in zip(names, gradients, cut_gradients, strict=True):
        worst[program.parameters[name]] = _apart(one, other)
    return worst


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))
