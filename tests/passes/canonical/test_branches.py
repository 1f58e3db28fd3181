"""Equal branches over slices, and heads one by one, become one batched op that computes the same; others are left."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.program.program import Program
from planner.capture.export import capture
from tests.models.one_body import WIDTH, OneBody, assert_capture_equals, batch

HEADS, SIZE = 4, 6


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SIZE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Gate(nn.Module):
    """A number of its own for each head, and a table that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand((), dtype=torch.float64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x * torch.sigmoid(self.weight) + table


def layer_norm() -> nn.Module:
    norm = nn.LayerNorm(SIZE, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    return norm


class Heads(nn.Module):
    """x [batch, heads, length, size] through ``way(parts, x, table)``; the loss reads every element differently."""

    def __init__(self, make: Callable[[], nn.Module], way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts, self.way = nn.ModuleList(make() for _ in range(HEADS)), way
        self.table = nn.Parameter(torch.rand(5, SIZE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.way(self.parts, x, self.table)
        return (y.sin() * torch.arange(y.numel(), dtype=y.dtype).view_as(y)).sum()


def split(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([part(piece) for part, piece in zip(parts, x.split(1, 1), strict=True)], 1)


def selected(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.stack([part(x[:, i]) for i, part in enumerate(parts)], 1)


def sliced(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([part(x[:, i : i + 1]) for i, part in enumerate(parts)], dim=-3)


def with_table(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([part(piece, table) for part, piece in zip(parts, x.chunk(HEADS, 1), strict=True)], 1)


def reversed_pieces(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([part(piece) for part, piece in zip(parts, reversed(x.split(1, 1)), strict=True)], 1)


def one_is_different(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    pieces = [part(piece) for part, piece in zip(parts, x.split(1, 1), strict=True)]
    return torch.cat([pieces[0] * 2.0, *pieces[1:]], 1)


def some_pieces(parts: nn.ModuleList, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([parts[i](x.split(1, 1)[i]) for i in range(HEADS - 1)], 1)


def program_of(make: Callable[[], nn.Module], way: Callable[..., Tensor]) -> tuple[Heads, Program]:
    torch.manual_seed(3)
    model = Heads(make, way)
    return model, capture(model, {"x": torch.empty(2, HEADS, 5, SIZE, dtype=torch.float64)})


def num_calls(program: Program, name: str) -> int:
    return sum(str(node.target).startswith(f"aten.{name}.") for node in program.graph.graph.nodes)


def gradients(model: Heads, program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients by the module itself, and by the captured graph."""
    x = torch.randn(2, HEADS, 5, SIZE, dtype=torch.float64)
    values = dict(model.named_parameters())
    names = [program.parameters.get(n.name) for n in program.graph.graph.find_nodes(op="placeholder")]
    wanted = [values[name] for name in names if name]
    expected = model(x)
    found = program.graph(*(values[name] if name else x for name in names))[0]
    grads = [torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in (expected, found)]
    return [expected, *grads[0]], [found, *grads[1]]


JOINED = [(layer_norm, split), (layer_norm, selected), (layer_norm, sliced), (RMSNorm, split), (RMSNorm, selected),
          (Gate, with_table)]  # fmt: skip
LEFT = [
    (layer_norm, reversed_pieces),
    (layer_norm, one_is_different),
    (layer_norm, some_pieces),
    (lambda: nn.Linear(SIZE, SIZE, dtype=torch.float64), split),  # a stack would hold what a cut of each need not
    (lambda: nn.Sequential(layer_norm(), nn.Dropout(0.5)), split),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "way"), JOINED)
def test_equal_branches_become_one_call(make, way):
    _, program = program_of(make, way)
    assert num_calls(program, "split_with_sizes") == num_calls(program, "slice") == 0
    assert num_calls(program, "layer_norm") + num_calls(program, "rsqrt") + num_calls(program, "sigmoid") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "way"), JOINED)
def test_joined_branches_compute_the_same(make, way):
    expected, found = gradients(*program_of(make, way))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "way"), LEFT)
def test_branches_that_differ_or_are_random_or_hold_matrices_are_left(make, way):
    model, program = program_of(make, way)
    assert num_calls(program, "layer_norm") + num_calls(program, "linear") >= HEADS - 1
    if make is layer_norm:
        expected, found = gradients(model, program)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_joined_call_keeps_the_line_of_the_user():
    _, program = program_of(layer_norm, split)
    call = next(n for n in program.graph.graph.nodes if str(n.target).startswith("aten.layer_norm."))
    assert "test_branches.py" in call.meta["stack_trace"]


# ---- heads computed one by one become one attention, with any op between whose rule keeps other dims apart


Weigh = Callable[[Tensor], Tensor]
NUM_HEADS, HEAD_SIZE = 4, 3
WEIGHED: dict[str, Weigh] = {
    "softmax": lambda scores: scores.softmax(-1),
    "over its largest": lambda scores: scores * scores.amax(-1, keepdim=True).tanh(),
    "over a sum": lambda scores: scores / (scores.square().sum(1, keepdim=True) + 1),
    "cumulative": lambda scores: scores.tanh().cumsum(-1),
    "cumulative products": lambda scores: scores.tanh().cumprod(1),
    "over logsumexp": lambda scores: scores * scores.logsumexp(-1, True).tanh(),
    "triangle": lambda scores: scores.tril(),
}
APART = {"triangle"}  # tril names no dims


class OneByOne(OneBody):
    def __init__(self, weigh: Weigh) -> None:
        super().__init__(lambda _, x: x)
        self.weigh = weigh
        self.parts = nn.ModuleList(nn.Linear(WIDTH, HEAD_SIZE, bias=False) for _ in range(3 * NUM_HEADS))
        self.out = nn.Linear(NUM_HEADS * HEAD_SIZE, WIDTH)
        self.body = OneByOne.heads
        self.double()

    def heads(self, x: Tensor) -> Tensor:
        three = [tuple(part(x) for part in self.parts[3 * i : 3 * i + 3]) for i in range(NUM_HEADS)]
        return self.out(torch.cat([self.weigh(q @ k.mT) @ v for q, k, v in three], -1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WEIGHED)
def test_heads_one_by_one_are_one_product_and_compute_the_same(name: str):
    model = OneByOne(WEIGHED[name])
    assert_capture_equals(model)
    targets = [str(n.target) for n in capture(model, batch()).graph.graph.nodes]
    is_left = sum("linear" in t or "matmul" in t or "bmm" in t for t in targets) > NUM_HEADS
    assert is_left == (name in APART)
