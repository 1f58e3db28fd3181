"""Every parameter is listed with its style, its cut and the reason; sizes that prevent a cut are errors or warnings."""

from functools import cache

import pytest
import torch
from torch import nn

from planner import Plan, PlanError, plan
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again


@cache
def planned(model: str, tp: int = 2, overrides: tuple[tuple[str, str], ...] = (), pp: int = 1) -> Plan:
    changes = {"mesh": {"tp": tp, "pp": pp}, "tensor_parallel": {"overrides": dict(overrides)}}
    return plan_again(build(model), spec_of(model, **changes))


def row(made: Plan, name: str):
    return next(p for p in made.parameters if p.name == name)


def warnings_of(made: Plan) -> list[str]:
    return [d.what for d in made.diagnostics if d.level == "warning"]


def test_every_parameter_of_the_model_is_listed_once_with_a_reason():
    model = build("gpt")
    made = planned("gpt")
    assert [p.name for p in made.parameters] == [name for name, _ in model.named_parameters()]
    assert {p.name: p.shape for p in made.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert all(len(p.reason) > 10 for p in made.parameters)


def test_the_megatron_pattern_has_its_words():
    made = planned("gpt", pp=2)
    expected = {
        "tokens.weight": (
            "vocab",
            "embedding and linear: sharded over the vocabulary; one all-reduce completes a lookup; each rank "
            "computes the loss on its shard, logits are never gathered",
        ),
        "blocks.0.attention.qkv.weight": (
            "column",
            "linear: features sharded by heads: each rank runs attention on its own heads; each of its 3 "
            "fused segments separately",
        ),
        "blocks.0.attention.qkv.bias": (
            "column",
            "bias of linear: sharded like the features that it is applied to; each of its 3 fused segments separately",
        ),
        "blocks.0.attention.out.weight": (
            "row",
            "linear: sums over sharded features; one all-reduce adds the partial results (g)",
        ),
        "blocks.0.attention.out.bias": (
            "replicate",
            "bias of linear after the all-reduce: added once, replicated",
        ),
        "blocks.0.mlp.up.weight": ("column", "linear: features sharded, because the next linear sums over them"),
        "blocks.0.norm1.weight": ("replicate", "layer_norm outside the tensor-parallel regions: replicated"),
    }
    assert {name: (row(made, name).style, row(made, name).reason) for name in expected} == expected
    assert row(made, "tokens.weight").stages == (0, 1)
    assert row(made, "tokens.weight").aliases == ("head.weight",)


def test_reasons_of_repeated_blocks_are_equal_so_that_they_fold():
    made = planned("gpt")
    by_kind: dict[str, set[str]] = {}
    for p in made.parameters:
        if p.name.startswith("blocks."):
            by_kind.setdefault(p.name.split(".", 2)[2], set()).add(p.reason)
    assert all(len(reasons) == 1 for reasons in by_kind.values())


def test_one_key_head_is_whole_and_its_gradient_summed_once_a_step():
    made = planned("llama, one key head")
    name = "model.layers.1.self_attn.k_proj.weight"
    assert row(made, name).style == "replicate"
    assert row(made, name).reason == (
        "linear: only 1 key head for tp 2: every rank computes it; gradients are summed over tp once per step"
    )
    assert any(c.axis == "tp" and c.phase == "step" for c in made.collectives)


def test_a_fused_weight_says_which_segments_are_whole():
    p = row(planned("fused, one key head"), "blocks.0.qkv.weight")
    assert (p.segments, p.whole_segments, p.local_shape) == ((32, 8, 8), (1, 2), (32, 32))
    assert p.reason.endswith(
        "its segments of 8 and 8 are replicated on each rank (fewer key heads than tp = 2), "
        "their gradients are summed over tp once per step"
    )


def test_tp_that_divides_no_heads_is_an_error_with_module_line_and_nearest_tp():
    with pytest.raises(PlanError) as caught:
        plan_again(build("three heads"), spec_of("three heads", mesh={"tp": 2}))
    told = str(caught.value)
    assert told.splitlines()[0] == "attention: 3 query heads not divisible by tp = 2"
    assert "at:  blocks.0   (plannable.py:" in told
    assert "F.scaled_dot_product_attention(q, k, v" in told
    assert 'fix: choose tp from {1, 3}, or set tensor_parallel.overrides: {"blocks.*.qkv": replicate}' in told


def test_heads_of_attention_written_by_hand_are_found_too():
    with pytest.raises(PlanError, match="3 query heads not divisible by tp = 2") as caught:
        plan_again(build("three heads by hand"), spec_of("three heads by hand", mesh={"tp": 2}))
    assert "softmax(-1) @ v" in str(caught.value)


def test_the_override_that_the_error_names_makes_the_plan_pass():
    made = planned("three heads", overrides=(("blocks.*.qkv", "replicate"),))
    assert row(made, "blocks.1.qkv.weight").reason == "override: replicate"
    assert row(made, "blocks.1.up.weight").style == "column"
    assert warnings_of(made) == [
        "this attention is replicated on every rank: 3 heads are not divisible by tp = 2; nearest valid tp: 1, 3"
    ]


@pytest.mark.thorough
def test_tp_that_divides_the_heads_of_some_blocks_only_is_a_warning():
    made = planned("three heads, then four")
    assert row(made, "blocks.1.qkv.weight").style == "column"
    assert row(made, "blocks.0.qkv.weight").reason == (
        "linear: 3 heads are not divisible by tp = 2; nearest valid tp: 1, 3"
    )
    assert warnings_of(made)[0].startswith("this attention is replicated on every rank: 3 heads")


def test_tp1_never_speaks_of_heads():
    made = planned("three heads", tp=1)
    assert warnings_of(made) == []
    assert {p.style for p in made.parameters} == {"replicate"}


def test_an_inner_size_that_does_not_divide_is_replicated_with_a_warning():
    made = planned("inner 33")
    reason = "dim 0 = 33 not divisible by tp = 2; nearest valid tp: 1, 3"
    assert row(made, "blocks.0.up.weight").reason == f"linear: {reason}"
    warning = next(d for d in made.diagnostics if d.where.startswith("blocks.0.up"))
    assert (warning.level, warning.what) == ("warning", f"linear [33, 32] is not sharded: {reason}")
    assert warning.fix == 'choose such a tp, or accept replication with overrides: {"blocks.*.up": replicate}'


def test_an_accepted_size_is_no_warning():
    made = planned("inner 33", overrides=(("blocks.*.up", "replicate"), ("blocks.*.down", "replicate")))
    assert warnings_of(made) == []


def test_an_override_of_one_block_leaves_the_others_as_they_were():
    made = planned("gpt", overrides=(("blocks.1.mlp.*", "replicate"),))
    styles = [row(made, f"blocks.{i}.mlp.up.weight").style for i in range(4)]
    assert styles == ["column", "replicate", "column", "column"]
    assert row(made, "blocks.1.mlp.up.weight").origin == "tensor_parallel.overrides.blocks.1.mlp.*"
    assert row(made, "blocks.2.mlp.up.weight").origin == "solver"


@pytest.mark.thorough
def test_an_override_has_the_line_of_the_spec_as_its_origin(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("""\
mesh: {tp: 2}
batch: {global: 8, micro: 2}
inputs: {input_ids: {shape: [16], dtype: int64, high: 64}, targets: {like: input_ids}}
tensor_parallel:
  overrides:
    "*.mlp.up": replicate
    "*.mlp.down": replicate
""")
    made = plan(build("gpt"), str(path))
    assert row(made, "blocks.3.mlp.down.weight").origin == "spec.yaml:7"


def test_an_unused_parameter_is_listed_and_said_to_be_unused():
    assert row(planned("unused"), "unused.weight").reason == "does not reach the loss"


@pytest.mark.thorough
def test_a_frozen_parameter_is_said_to_be_frozen_and_has_no_place_in_the_buffers():
    model = build("gpt")
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    made = plan_again(model, spec_of("gpt", mesh={"tp": 2}))
    assert row(made, "blocks.0.mlp.up.weight").reason.endswith("; frozen: no gradient")
    held = {name for b in made.optimizer.buffers for bucket in b.buckets for name in bucket.parameters}
    assert held == {p.name for p in made.parameters} - {"blocks.0.mlp.up.weight"}


class Grouped(nn.Module):
    """Two equal groups of rows, a matrix each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(16, width), nn.Parameter(torch.ones(2, width, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        return torch._grouped_mm(x, self.up, torch.tensor([1, 2], dtype=torch.int32) * (x.shape[0] // 2)).float().sum()


def test_a_part_of_a_grouped_product_has_rows_of_whole_16_bytes():
    spec = spec_of("gpt", mesh={"tp": 2}, inputs={"ids": {"shape": [8], "dtype": "int64", "high": 16}})
    cut, kept = (row(plan(Grouped(width).bfloat16(), spec), "up") for width in (16, 24))
    assert cut.style in ("column", "row")
    assert kept.style == "replicate"
    assert "dim 1 = 24 and dim 2 = 24 over tp = 2: a rank's rows would be no multiple of 16 bytes" in kept.reason
