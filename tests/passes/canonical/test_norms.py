"""Spelled-out RMS norms become aten.rms_norm where that is the same formula, to the last bit on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.canonical.norms import fuse_norms, spelled_norms
from passes.program.program import Program
from planner.capture.export import capture
from tests.models.one_body import WIDTH, OneBody, batch
from tests.tools.captured_ops import gradients

aten = torch.ops.aten
Norm = Callable[[Tensor], Tensor]
EPS = 1e-5


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def in_float(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(mean_square(wide) + EPS)).to(x.dtype)


SAME: dict[str, Norm] = {
    "pow": lambda x: x * torch.rsqrt(mean_square(x) + EPS),
    "square, the last dim by number": lambda x: torch.rsqrt(x.square().mean(2, keepdim=True) + EPS) * x,
    "eps as an integer": lambda x: x * torch.rsqrt(mean_square(x) + 1),
}
STAYS: dict[str, Norm] = {
    "a product with itself, whose gradient has two addends": lambda x: (
        x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    ),
    "divided by a root": lambda x: x / torch.sqrt(mean_square(x) + EPS),
    "of another dim": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS),
    "of two dims": lambda x: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + EPS),
    "eps beside the root": lambda x: x * (torch.rsqrt(mean_square(x)) + EPS),
    "eps of the batch": lambda x: x * torch.rsqrt(mean_square(x) + EPS * x.detach().abs().max()),
    "around the mean": lambda x: x * torch.rsqrt(mean_square(x - x.mean(-1, keepdim=True)) + EPS),
    "cubes": lambda x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + EPS),
    "the norm of another": lambda x: x.sin() * torch.rsqrt(mean_square(x) + EPS),
    "a sum": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
}


def normed(norm: Norm, dtype: torch.dtype = torch.float64) -> OneBody:
    model = OneBody(lambda m, x: norm(m.up(x)) * m.scale)
    return model.to(dtype)


def num_fused(program: Program) -> int:
    return len(program.graph.graph.find_nodes(op="call_function", target=aten.rms_norm.default))


def assert_same_bits(model: nn.Module, num_ops: int) -> None:
    """Loss and gradients of the rewritten graph are those of the graph as it was captured."""
    before = gradients(model, batch())
    program = capture(model, batch())
    assert [norm.num_ops for norm in spelled_norms(program)] == [num_ops]
    after = gradients(model, batch(), change=fuse_norms)
    assert torch.equal(before[0], after[0])
    assert before[1].keys() == after[1].keys()
    for name, gradient in before[1].items():
        assert torch.equal(gradient, after[1][name]), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_spelled_norm_is_one_op_with_the_same_bits(name, dtype):
    model = normed(SAME[name], dtype)
    program = capture(model, batch())
    fuse_norms(program)
    assert num_fused(program) == 1
    assert not program.graph.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
    ((what, where),) = program.rewrites
    assert "RMS norm in 5 ops" in what
    assert "one_body.py" in str(where)
    assert_same_bits(model, 5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_the_casts_around_it_belong_to_it(dtype):
    model = normed(in_float, dtype)
    program = capture(model, batch())
    fuse_norms(program)
    (node,) = program.graph.graph.find_nodes(op="call_function", target=aten.rms_norm.default)
    assert node.args[1:] == ([WIDTH], None, EPS)
    assert node.args[0].meta["val"].dtype == node.meta["val"].dtype == dtype
    assert_same_bits(model, 7)


@pytest.mark.thorough
def test_what_reads_it_in_float32_too_keeps_the_casts():
    def body(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(mean_square(wide) + EPS) + wide).to(x.dtype)

    assert_same_bits(normed(body, torch.bfloat16), 5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STAYS)
def test_another_formula_stays(name):
    program = capture(normed(STAYS[name]), batch())
    fuse_norms(program)
    assert num_fused(program) == 0
    assert not program.rewrites


@pytest.mark.parametrize("name", SAME)
def test_a_norm_that_is_computed_in_half_precision_stays(name):
    """aten.rms_norm would compute it in float32."""
    program = capture(normed(SAME[name], torch.bfloat16), batch())
    fuse_norms(program)
    assert num_fused(program) == 0


def test_a_root_that_others_read_stays():
    def body(x: Tensor) -> Tensor:
        root = torch.rsqrt(mean_square(x) + EPS)
        return x * root + root

    program = capture(normed(body), batch())
    fuse_norms(program)
    assert num_fused(program) == 0
