"""Collectives, buffers, memory, diagnostics and JSON of whole plans; attention within documents."""

import json
from math import prod
from typing import Any

import pytest
import torch

from planner import Plan, plan
from planner.commands.cli import format_plan
from planner.placement.candidates import divisors, nearest_tp
from planner.tables import op_notes
from planner.tables.op_notes import without_rule
from tests.models.of_documents import Gpt
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again


def planned(model: str, **changes) -> Plan:
    return plan(build(model), spec_of(model, **changes))


def test_divisors_and_the_nearest_valid_tp():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest_tp([33], 2) == [1, 3]
    assert nearest_tp([12, 18], 4) == [3, 6]
    assert nearest_tp([5], 8) == [5]
    assert nearest_tp([8], 4) == [4]


@pytest.mark.thorough
def test_a_boundary_is_sent_and_received_with_its_gradient_the_other_way():
    made = planned("gpt", mesh={"pp": 2})
    rows = [(r.kind, r.phase, r.stage, r.bytes) for r in made.collectives if r.axis == "pp"]
    size = made.stages[0].sends[0].bytes
    assert sorted(rows) == [
        ("recv", "backward", 0, size),
        ("recv", "forward", 1, size),
        ("send", "backward", 1, size),
        ("send", "forward", 0, size),
    ]


@pytest.mark.thorough
def test_zero1_reduces_and_gathers_every_bucket_and_zero0_sums_it():
    rows = [r for r in planned("gpt", mesh={"dp": 2}, optimizer={"bucket_size": 20000}).collectives if r.axis == "dp"]
    assert {(r.kind, r.phase, r.per) for r in rows} == {
        ("reduce_scatter", "step", "step"),
        ("all_gather", "step", "step"),
    }
    assert len(rows) > 2
    rows = [r for r in planned("gpt", mesh={"dp": 2}, optimizer={"zero": 0}).collectives if r.axis == "dp"]
    assert [r.kind for r in rows] == ["all_reduce"]


def test_one_rank_alone_exchanges_nothing():
    assert planned("gpt", mesh={"tp": 1}).collectives == ()


@pytest.mark.thorough
def test_every_trainable_parameter_of_a_stage_has_one_place_in_the_buffers_of_its_rank():
    made = planned("gpt", mesh={"tp": 2, "pp": 2, "dp": 2})
    for rank in range(2):
        buckets = [bucket for b in made.optimizer.buffers if b.pp_rank == rank for bucket in b.buckets]
        names = [name for bucket in buckets for name in bucket.parameters]
        assert sorted(names) == sorted(p.name for p in made.parameters if rank in p.stages)


@pytest.mark.thorough
def test_memory_is_that_of_the_buffers_with_their_padding():
    made = planned("gpt", mesh={"pp": 2, "dp": 2}, precision={"parameters": "bfloat16", "gradients": "float32"})
    for row in made.memory:
        elements = sum(b.num_elements for b in made.optimizer.buffers if b.pp_rank == row.pp_rank)
        held = sum(prod(p.shape) for p in made.parameters if row.pp_rank in p.stages)
        assert held <= elements < held + 4000
        assert (row.parameters, row.gradients, row.optimizer) == (2 * elements, 4 * elements, 12 * elements // 2)


def decay_notes(**optimizer) -> list[str]:
    made = planned("gpt", mesh={}, optimizer={"weight_decay": 0.1, **optimizer})
    return [row.what for row in made.diagnostics if row.where == "optimizer.no_decay"]


@pytest.mark.thorough
def test_a_plan_says_once_that_norms_and_biases_are_decayed():
    (note,) = decay_notes()
    assert note.startswith("norms and biases are decayed: ")
    assert decay_notes(no_decay="vectors") == decay_notes(weight_decay=0.0) == []


class Looped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = (x * self.scale + 1.0).tanh()
        return x.mean()


@pytest.mark.thorough
def test_a_loop_that_the_export_unrolls_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(op_notes, "_MANY", 100)
    spec = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"x": {"shape": [4], "dtype": "float32"}}}
    (row,) = [row for row in plan(Looped(), spec).diagnostics if row.what.startswith("export: ")]
    assert row.what == "export: 121 nodes; a loop is unrolled, 120 nodes are of one line"
    assert ".tanh()" in row.where
    assert not [row for row in planned("gpt", mesh={"tp": 1}).diagnostics if row.what.startswith("export: ")]


@pytest.mark.thorough
def test_ops_without_a_rule_are_named_with_line_and_share():
    made = planned("no rule", mesh={"tp": 2})
    rows = list(without_rule(made.to_run()[0]))
    assert rows
    assert all("plannable.py:" in row.where for row in rows)
    told = [d for d in made.diagnostics if "has no rule and" in d.what]
    assert len(told) == len(rows)
    assert all(d.level == "warning" and "of the estimated work" in d.what for d in told)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama", "bert"])
def test_the_four_families_use_no_op_without_a_rule(model):
    assert not list(without_rule(planned(model, mesh={"tp": 2}).to_run()[0]))


@pytest.mark.thorough
def test_each_linear_embedding_and_loss_is_listed():
    made = planned("gpt", mesh={"tp": 2})
    listed = [(d.where.split(" ")[0], d.what.split(":")[0]) for d in made.diagnostics if d.level == "info"]
    assert ("blocks.3.mlp.down", "linear [32, 128] is sharded (row)") in listed
    assert ("tokens", "embedding [64, 32] is sharded (vocab)") in listed
    assert ("head", "linear [64, 32] is sharded (vocab)") in listed
    assert any(what == "cross_entropy_loss over 64 classes is sharded (vocab)" for _, what in listed)
    assert sum(what.startswith("linear") for _, what in listed) == 4 * 4 + 1


@pytest.mark.thorough
def test_repeated_layers_print_as_one_line():
    lines = planned("gpt", mesh={"tp": 2}).describe().splitlines()
    (row,) = [line.split() for line in lines if "linear is sharded (row)" in line]
    assert row[row.index("linear") - 1] == "8"  # two of each of four layers


@pytest.mark.thorough
def test_the_summary_counts_what_is_cut():
    whole, cut = planned("gpt", mesh={"tp": 1}).summary, planned("gpt", mesh={"tp": 2}).summary
    assert (whole.flops_sharded_fraction, whole.parameters_sharded_fraction) == (0.0, 0.0)
    assert cut.flops_sharded_fraction == 1.0
    assert 0.9 < cut.parameters_sharded_fraction < 1.0
    assert cut.num_parameters == sum(p.numel() for p in build("gpt").parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("gpt", {"tp": 2, "pp": 2, "dp": 2}), ("fused, one key head", {"tp": 2}), ("inner 33", {"tp": 2, "pp": 2})],
)
def test_json_and_files_give_the_same_plan_back(tmp_path, model, mesh):
    made = planned(model, mesh=mesh)
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    path.write_text(format_plan(made, "json"))
    assert Plan.load(path) == made
    assert Plan.load(path).hash() == made.hash()
    assert json.loads(path.read_text())["cost"] is None


@pytest.mark.thorough
def test_two_plans_of_one_model_are_equal():
    first, second = (planned("gpt", mesh={"tp": 2, "pp": 2}) for _ in range(2))
    assert first == second


# ---- what a plan says of attention within documents, and what their mean length does to the forecast


LENGTH = 12
INPUTS = ("tokens", "targets", "position_ids", "document_ids")


def packed(mean: int | None = None, cluster: str | None = None, **more: Any) -> Plan:
    inputs = {name: {"shape": [LENGTH], "dtype": "int64"} for name in INPUTS}
    spec = {
        "mesh": {"tp": 2},
        "batch": {"global": 4, "micro": 2},
        "inputs": inputs,
        "tensor_parallel": {"vocabulary_multiple": 8},
        "data": {"packing": "documents"} | ({} if mean is None else {"mean_document": mean}),
        "cluster": cluster,
    }
    with torch.device("meta"):
        model = Gpt()
    return plan_again(model, spec | more)


def remarks(made: Plan, word: str) -> list[str]:
    return [row.what for row in made.diagnostics if word in row.what]


@pytest.mark.thorough
def test_the_plan_lists_attention_within_documents() -> None:
    assert remarks(packed(4), "within documents") == [
        "2 attentions run within documents: 33% of the pairs of a sequence of 12, for documents of 4 tokens"
    ]
    (found,) = (row for row in packed().diagnostics if "within documents" in row.what)
    assert "unless documents are shorter" in found.what
    assert "data.mean_document" in found.fix


def test_under_graphs_and_without_packing_it_computes_all_pairs() -> None:
    graphs = packed(cuda_graphs={"impl": "emulate", "scope": ["attn"]})
    assert not remarks(graphs, "within documents")
    assert "as CUDA graphs hold the blocks of no document" in remarks(graphs, "compute all pairs")[0]
    assert not remarks(packed(data={"packing": True}), "documents")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mean", [2, 3, 6])
def test_products_of_attention_are_in_proportion_to_documents(mean: int) -> None:
    """Of a rank: 2 heads, 2 products forward and 5 backward (flash) of width 8, 4 sequences, 2 layers."""
    found, whole = packed(mean).step_flops(), packed(LENGTH).step_flops()
    pairs = LENGTH * (LENGTH - mean)
    assert whole - found == pytest.approx(2 * 7 * 2 * 8 * 4 * 2 * pairs)


def test_memory_is_that_of_documents() -> None:
    few, all_ = (packed(mean).memory[0] for mean in (3, LENGTH))
    assert few.parameters == all_.parameters
    assert few.total <= all_.total


def test_time_is_less_with_short_documents() -> None:
    seconds = [packed(mean, "dgx-a100").cost for mean in (3, LENGTH)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0].flops < seconds[1].flops
