"""Hidden matrices are found by structure, and fused weights as the model cuts their results."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.program.matrices import Matrices, find_matrices
from planner import plan
from tests.models import families
from tests.tools.specs import inputs_of

WIDTH, HEADS, HEAD = 24, 3, 8


class Cut(nn.Module):
    """Two layers around ``body``, which gets the result [b, s, 3 · width] of a fused weight."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.fused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.last, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.last(self.body(self.fused(self.first(x))))
        return F.cross_entropy(self.head(found).flatten(0, 1), y.flatten())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, h, s, d] each → [b, s, h · d]."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * 0.8 - b * 0.6, b * 0.8 + a * 0.6], -1)


def chunked(x: Tensor) -> Tensor:
    return attend(*(part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in x.chunk(3, -1)))


def rotating(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in x.chunk(3, -1))
    return attend(rotated(q), rotated(k), v)


def by_head(x: Tensor) -> Tensor:
    return attend(*x.unflatten(-1, (HEADS, 3 * HEAD)).transpose(1, 2).chunk(3, -1))


def by_index(x: Tensor) -> Tensor:
    qkv = x.view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
    return attend(qkv[0], qkv[1], qkv[2])


def gated(x: Tensor) -> Tensor:
    gate, up, bias = x.split(WIDTH, -1)
    return F.silu(gate) * up + bias


def every_third(x: Tensor) -> Tensor:
    return x[..., ::3] * x[..., 1::3] + x[..., 2::3]


def read_whole(x: Tensor) -> Tensor:
    return x[..., :WIDTH] * x.mean(-1, keepdim=True) + x[..., WIDTH : 2 * WIDTH] * x[..., 2 * WIDTH :]


def spelled_out(x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in x.chunk(3, -1))
    return ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def last_first(x: Tensor) -> Tensor:
    """Heads are the last dim of the projection: no head has its rows side by side."""
    return attend(*(part.unflatten(-1, (HEAD, HEADS)).permute(0, 3, 1, 2) for part in x.chunk(3, -1)))


THIRDS = Matrices(0, 1, (WIDTH, WIDTH, WIDTH))
WHOLE = Matrices(0, 1, (3 * WIDTH,))
CUTS = {
    chunked: THIRDS,
    rotating: THIRDS,
    by_head: Matrices(0, HEADS, (HEAD, HEAD, HEAD)),
    by_index: THIRDS,
    gated: THIRDS,
    every_third: Matrices(0, WIDTH, (1, 1, 1)),
    read_whole: WHOLE,
}


EACH_HEAD = Matrices(0, 1, (HEAD,) * 3 * HEADS)
CUTS_BY_HEADS = {
    **CUTS, chunked: EACH_HEAD, rotating: EACH_HEAD, by_head: EACH_HEAD, by_index: EACH_HEAD, spelled_out: EACH_HEAD,
    last_first: THIRDS,
}  # fmt: skip


def found_in(model: nn.Module, inputs: dict[str, Tensor], *, by_heads: bool = False) -> dict[str, Matrices]:
    spec = {
        "mesh": {},
        "batch": {"global": 2, "micro": 2},
        "inputs": inputs_of(inputs),
    }
    program = plan(model, spec).to_run()[0].program
    return find_matrices(program.graph.graph, program.parameters, by_heads=by_heads)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", CUTS, ids=lambda body: body.__name__)
def test_a_fused_weight_is_a_matrix_for_each_part(body: Any) -> None:
    found = found_in(Cut(body), {"x": torch.randn(2, 4, WIDTH), "y": torch.zeros(2, 4, dtype=torch.int64)})
    assert found.keys() == {"first.weight", "fused.weight", "last.weight"}
    assert found["fused.weight"] == CUTS[body]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", CUTS_BY_HEADS, ids=lambda body: body.__name__)
def test_by_heads_each_head_that_attention_reads_is_a_matrix(body: Any) -> None:
    inputs = {"x": torch.randn(2, 4, WIDTH), "y": torch.zeros(2, 4, dtype=torch.int64)}
    found = found_in(Cut(body), inputs, by_heads=True)
    assert found["fused.weight"] == CUTS_BY_HEADS[body]
    assert found["first.weight"] == found["last.weight"] == Matrices(0, 1, (WIDTH,))


def test_the_ranges_of_matrices_tile_their_dim() -> None:
    for matrices in CUTS.values():
        rows = [r for i in range(len(matrices.sizes)) for a, b in matrices.ranges(i) for r in range(a, b)]
        assert sorted(rows) == list(range(3 * WIDTH))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fqn", "wanted"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn.weight", Matrices(1, 1, (32, 32, 32))),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", Matrices(0, 4, (8, 8, 8))),
        ("falcon-new", "transformer.h.0.self_attention.query_key_value.weight", Matrices(0, 2, (16, 8, 8))),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", Matrices(0, 1, (88, 88))),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", Matrices(1, 1, (88, 88))),
        ("torch-encoder", "encoder.layers.0.self_attn.in_proj_weight", Matrices(0, 1, (32, 32, 32))),
    ],
)
def test_families(name: str, fqn: str, wanted: Matrices) -> None:
    entry = families.build(name)
    found = found_in(entry.model, entry.batch(2, 0))
    assert found[fqn] == wanted
    tables = {n for n, m in entry.model.named_modules() if isinstance(m, nn.Embedding)}
    assert not any(f"{table}.weight" in found for table in tables)
    assert not any("lm_head" in n or n.startswith("head.") for n in found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "fqn", "wanted"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", Matrices(0, 1, (8,) * 4)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", Matrices(1, 1, (8,) * 12)),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", Matrices(0, 1, (8,) * 12)),
        ("falcon-new", "transformer.h.0.self_attention.query_key_value.weight", Matrices(0, 1, (8,) * 8)),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", Matrices(0, 1, (88, 88))),
    ],
)
def test_families_by_heads(name: str, fqn: str, wanted: Matrices) -> None:
    entry = families.build(name)
    assert found_in(entry.model, entry.batch(2, 0), by_heads=True)[fqn] == wanted
