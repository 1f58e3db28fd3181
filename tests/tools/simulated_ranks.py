"""Run one op as every tp rank would, in one process, and hold values and gradients against the op on whole tensors.

What a rank gets of a value, and of the gradient of a result, follows from its type:

    type              value                     gradient
    I                 the whole                 the whole
    R                 the whole                 a random part, the ranks' parts add up to the whole
    V                 its slices                its slices; of a segment held whole as R has it
    P                 a random part             the whole

A right rule and a right localisation give results, and gradients of the inputs, that are typed the same way.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.base import StageGraph
from passes.localize import localize
from passes.partition.type_changes import Placements
from passes.partition.typings.base import Form
from passes.partition.typings.table import Option
from passes.types.types import Placement
from planner import Plan
from tests.tools.captures import plan_again
from tests.tools.graphs import bare_context
from tests.tools.ranks import Ranks
from tests.tools.simulated_mesh import Batch, Make, equals_one_process, spec_of

TOLERANCE = {
    torch.float64: {"rtol": 1e-7, "atol": 1e-9},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.complex128: {"rtol": 1e-7, "atol": 1e-9},
}


def parts(x: Tensor, placement: Placement, tp: int, generator: torch.Generator, *, gradient: bool) -> list[Tensor]:
    """What each rank has of the value (or the gradient) ``x``. A value's padding holds rubbish, a gradient's zeros."""
    added_up = _random_parts(x, tp, generator)
    if placement.kind != "V":
        return added_up if placement.kind == ("R" if gradient else "P") else [x] * tp
    shards = []
    for rank in range(tp):
        pieces, dim = [], placement.dim
        for segment, whole, mine in _by_segment(x, placement, tp, rank):
            if segment.sharded or not gradient:
                pieces.append(mine(_padded(x, placement, generator, rubbish=not gradient)))
            else:
                pieces.append(whole(added_up[rank]))
        shards.append(torch.cat(pieces, dim))
    return shards


def _random_parts(x: Tensor, tp: int, generator: torch.Generator) -> list[Tensor]:
    if not _inexact(x):
        return [x] * tp
    drawn = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(tp - 1)]
    return [*drawn, x - sum(drawn)] if drawn else [x]


def _inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _padded(x: Tensor, placement: Placement, generator: torch.Generator, *, rubbish: bool) -> Tensor:
    if not placement.padding:
        return x
    shape = [placement.padding if d == placement.dim else n for d, n in enumerate(x.shape)]
    more = torch.zeros(shape, dtype=x.dtype)
    if rubbish and _inexact(x):
        more = torch.randn(shape, dtype=x.dtype, generator=generator).abs().to(x.dtype) * 3
    return torch.cat([x, more], placement.dim)


def _by_segment(x: Tensor, placement: Placement, tp: int, rank: int) -> Iterable[tuple[Any, Any, Any]]:
    """(segment, narrow to all of it, narrow to what the rank holds of it), in the padded dim."""
    start = 0
    for segment, (first, last) in zip(placement.segments, placement.slices(tp, rank), strict=True):

        def whole(y: Tensor, a: int = start, n: int = segment.size) -> Tensor:
            return y.narrow(placement.dim, a, n)

        def mine(y: Tensor, a: int = first, n: int = last - first) -> Tensor:
            return y.narrow(placement.dim, a, n)

        yield segment, whole, mine
        start += segment.size


def assert_typed(held: list[Tensor], x: Tensor, placement: Placement, *, gradient: bool, what: str) -> None:
    """The ranks' tensors are ``x`` (a value, or a gradient) in type ``placement``."""
    tp = len(held)
    for rank, mine in enumerate(held):
        shape = placement.local_shape(tuple(x.shape), tp)
        assert tuple(mine.shape) == shape, f"{what} on rank {rank}: shape {tuple(mine.shape)}, not {shape}"
        assert mine.dtype == x.dtype, f"{what} on rank {rank}: {mine.dtype}, not {x.dtype}"
    if placement.kind == "V":
        _assert_shards(held, x, placement, gradient, what)
    elif placement.kind == ("R" if gradient else "P"):
        _close(sum(held), x, f"{what} ({placement}), added up over the ranks")  # pyright: ignore
    else:
        for rank, mine in enumerate(held):
            _close(mine, x, f"{what} ({placement}) on rank {rank}")


def _assert_shards(held: list[Tensor], x: Tensor, placement: Placement, gradient: bool, what: str) -> None:
    tp, dim, offset, start = len(held), placement.dim, 0, 0
    for segment in placement.segments:
        whole = x.narrow(dim, start, segment.size)
        last = start + segment.size == x.shape[dim]
        size = (segment.size + (placement.padding if last else 0)) // tp if segment.sharded else segment.size
        pieces = [mine.narrow(dim, offset, size) for mine in held]
        if segment.sharded:
            together = torch.cat(pieces, dim)
            _close(together.narrow(dim, 0, segment.size), whole, f"{what} ({placement})")
            if gradient:
                rest = together.narrow(dim, segment.size, together.shape[dim] - segment.size)
                _close(rest, torch.zeros_like(rest), f"{what} ({placement}): padding")
        elif gradient:
            _close(sum(pieces), whole, f"{what} ({placement}), a whole segment, added up")  # pyright: ignore
        else:
            for piece in pieces:
                _close(piece, whole, f"{what} ({placement}), a whole segment")
        offset, start = offset + size, start + segment.size


def _close(mine: Tensor, expected: Tensor, what: str) -> None:
    tolerance = TOLERANCE.get(mine.dtype, {"rtol": 0, "atol": 0})
    torch.testing.assert_close(mine, expected, **tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}")


@dataclass
class Op:
    """One call under test (with the split that it takes an item of) and whole float64 values of its inputs."""

    node: fx.Node
    values: dict[str, Tensor]

    @property
    def chain(self) -> list[fx.Node]:
        return [self.node.all_input_nodes[0], self.node] if self.node.target is operator.getitem else [self.node]

    @property
    def inputs(self) -> list[fx.Node]:
        return self.chain[0].all_input_nodes

    def differentiable(self, node: fx.Node) -> bool:
        return bool(node.meta.get("grad")) and _inexact(self.values[node.name])

    def run_whole(self, values: list[Tensor]) -> Tensor:
        env: dict[fx.Node, Any] = dict(zip(self.inputs, values, strict=True))
        for node in self.chain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)  # pyright: ignore
        return env[self.node]


def local_module(op: Op, chosen: list[Option], tp: int, rank: int) -> fx.GraphModule:
    """The op as lowering leaves it on ``rank``; ``chosen``: an option for each call of its chain."""
    stage = StageGraph(0, fx.Graph(), nn.Module())
    options = {n.name: Option((), t, Form.WHOLE) for n, t in zip(op.inputs, chosen[0].args, strict=True)}
    for node in op.inputs:
        stage.env[node.name] = stage.graph.placeholder(node.name)
    options |= {n.name: o for n, o in zip(op.chain, chosen, strict=True)}
    for node in op.chain:
        stage.env[node.name] = stage.graph.node_copy(node, lambda n: stage.env[n.name])
    for origin in (*op.inputs, *op.chain):
        stage.env[origin.name].meta = {**origin.meta, "origin": origin.name}
    stage.graph.output((stage.env[op.node.name],))
    localize(stage, bare_context(Placements(tp, options, {}), tp, rank))
    stage.graph.eliminate_dead_code()
    stage.graph.lint()
    return fx.GraphModule(stage.root, stage.graph)


def check(op: Op, option: Option, tp: int, seed: int = 0, source: Option | None = None) -> None:
    """Raises AssertionError where a rank's result or gradient is not as the option says.

    ``source``: the option of the split (or other tuple) that the op takes an item of.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = [op.values[n.name].detach().requires_grad_(op.differentiable(n)) for n in op.inputs]
    assert not any(x.is_meta for x in whole), "values on meta: nothing would be compared"
    expected = op.run_whole(whole)
    chosen = [option] if source is None else [source, option]
    assert len(chosen) == len(op.chain)
    types = chosen[0].args
    given = [parts(x.detach(), t, tp, generator, gradient=False) for x, t in zip(whole, types, strict=True)]
    differentiable = [i for i, x in enumerate(whole) if x.requires_grad]
    backward = expected.requires_grad
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=generator) if backward else None
    pulled = parts(cotangent, option.out, tp, generator, gradient=True) if cotangent is not None else [None] * tp
    modules = [local_module(op, chosen, tp, rank) for rank in range(tp)]

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        mine = [g[rank].detach().clone().requires_grad_(i in differentiable) for i, g in enumerate(given)]
        (out,) = modules[rank](*mine)
        leaves = [mine[i] for i in differentiable]
        if not backward:
            return out, []
        assert out.shape == pulled[rank].shape, f"result on rank {rank}: {tuple(out.shape)}, not as {option.out}"
        if not out.requires_grad:
            return out.detach(), [torch.zeros_like(x) for x in leaves]
        return out.detach(), list(torch.autograd.grad(out, leaves, pulled[rank], materialize_grads=True))

    exchanges = any(n.op == "get_attr" for n in modules[0].graph.nodes)
    ran = Ranks(tp).run(run) if exchanges else [run(rank) for rank in range(tp)]
    assert_typed([out for out, _ in ran], expected.detach(), option.out, gradient=False, what="result")
    if backward and differentiable:
        leaves = [whole[i] for i in differentiable]
        gradients = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True)
        for slot, (i, gradient) in enumerate(zip(differentiable, gradients, strict=True)):
            held = [got[slot] for _, got in ran]
            assert_typed(held, gradient, types[i], gradient=True, what=f"gradient of input {i}")


# ---- a whole model over tp


def built(make: Make) -> nn.Module:
    """The model in float64, with equal weights at every call; none is zero or one by initialisation."""
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def over_tp(batch: Batch, tp: int, overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One microbatch of ``batch`` on tp ranks; a padded vocabulary is padded little."""
    return spec_of(batch, {"tp": tp}, **_cut(overrides))


def planned(make: Make, batch: Batch, tp: int, overrides: Mapping[str, str] | None = None) -> Plan:
    return plan_again(built(make), over_tp(batch, tp, overrides))


def assert_equals_one_process(
    make: Make, batch: Batch, tp: int = 2, overrides: Mapping[str, str] | None = None
) -> Plan:
    """Each rank's gradients too are those of the model alone, in the parameter's type."""
    ran = equals_one_process(lambda: built(make), batch, {"tp": tp}, each=(1e-7, 1e-9), **_cut(overrides))
    for local in ran.programs[0].stages[0].parameters:
        held = [found[local.fqn] for found in ran.of_ranks]
        assert_typed(held, ran.truth.gradients[local.fqn], local.placement, gradient=True, what=local.fqn)
    return ran.plan


def _cut(overrides: Mapping[str, str] | None) -> dict[str, Any]:
    return {"tensor_parallel": {"overrides": dict(overrides or {}), "vocabulary_multiple": 8}}


def num_collectives(made: Plan) -> int:
    """Exchanges of a microbatch over tp, forward and backward."""
    return sum(row.count for row in made.collectives if row.axis == "tp" and row.per == "microbatch")
