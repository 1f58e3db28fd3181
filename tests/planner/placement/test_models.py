"""Models whose placement once failed: weights made by adapters, ops along a dim of a number, rows of experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from tests.models.families import build
from tests.tools.laboratory import Case, spec_of
from tests.tools.simulated_ranks import assert_equals_one_process


class Hadamard(torch.autograd.Function):
    """(a @ b) * (c @ d) * scale."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c, d, scale)
        return (a @ b) * (c @ d) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b, c, d, scale = ctx.saved_tensors
        scaled = gradients[0] * scale
        left, right = scaled * (c @ d), scaled * (a @ b)
        return left @ b.T, a.T @ left, right @ d.T, c.T @ right, None


class Adapted(nn.Module):
    """A frozen linear and what an adapter adds to its weight."""

    def __init__(self, size: int, made: int, kind: str) -> None:
        super().__init__()
        self.base, self.kind = nn.Linear(size, made).requires_grad_(False), kind
        shapes = ((2, 2), (made // 2, size // 2)) if kind == "kron" else ((made, 2), (2, size)) * 2
        self.parts = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        if (not self.training) or torch.rand(1) > 0.0:
            delta = torch.kron(*self.parts) if self.kind == "kron" else Hadamard.apply(*self.parts, torch.tensor(0.5))
            result = result + F.linear(x, delta.reshape(self.base.weight.shape).to(x.dtype))
        return result


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.up = nn.ModuleList(Adapted(8, 16, kind) for _ in range(2))
        self.down = nn.ModuleList(Adapted(16, 8, kind) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["kron", "hadamard"])
def test_weights_made_by_adapters_over_tp_equal_one_process(kind: str) -> None:
    make: Callable[[], nn.Module] = lambda: Model(kind)  # noqa: E731
    assert_equals_one_process(make, {"ids": torch.arange(24).view(4, 6) % 16})


# ---- ops along a dim of a tensor without dims: PyTorch takes dim 0 and -1 of it, so a user's model may


SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"x": {"shape": [4], "dtype": "float32"}},
}
ZERO, FIRST = torch.tensor(0), torch.zeros(1, dtype=torch.int64)
ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(-1),
    "amax": lambda t: t.amax(0),
    "softmax": lambda t: t.softmax(0),
    "logsumexp": lambda t: t.logsumexp(0),
    "cumsum": lambda t: t.cumsum(0),
    "sort": lambda t: t.sort(0)[0],
    "index_select": lambda t: t.index_select(0, FIRST).sum(),
    "gather": lambda t: t.gather(0, ZERO),
    "unfold": lambda t: t.unfold(0, 1, 1).sum(),
}


class Gained(nn.Module):
    """An MLP whose loss is multiplied by what ``along`` makes of a number."""

    def __init__(self, along: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain, self.along = nn.Parameter(torch.tensor(1.0)), along

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean() * self.along(self.gain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALONG)
def test_an_op_along_a_dim_of_a_number_is_planned(name: str):
    rows = {row.name: row for row in plan(Gained(ALONG[name]), SPEC).parameters}
    assert (rows["gain"].dim, rows["up.weight"].dim, rows["down.weight"].dim) == (None, 0, 1)


# ---- rows that came back from experts stay partial sums over tp until the k rows of each token are added up


MESH = {"tp": 2, "dp": 2, "ep": 2, "etp": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("along_the_sequence", [True, False])
def test_one_row_of_each_token_is_summed_over_ranks_and_not_k(along_the_sequence: bool) -> None:
    entry = build("mixtral")
    more = {"tensor_parallel": {"sequence_parallel": along_the_sequence}}
    made = plan(entry.model, spec_of(entry, Case("mixtral", MESH, more)))
    rows = [c for c in made.collectives if c.axis == "tp" and c.per == "microbatch" and "mlp.experts" in str(c.where)]
    sums = {(c.kind, c.bytes) for c in rows if c.phase == "forward" and c.kind in ("all_reduce", "reduce_scatter")}
    (gathered,) = {c.bytes for c in made.collectives if c.kind == "all_gather" and "q_proj" in str(c.where)} or {0}
    assert len(sums) == 1
    assert not along_the_sequence or sums == {("reduce_scatter", gathered)}
    assert all(kind == ("reduce_scatter" if along_the_sequence else "all_reduce") for kind, _ in sums)
