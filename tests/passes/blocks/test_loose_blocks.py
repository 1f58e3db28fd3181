"""Blocks and stages of models whose layers are no modules that are called."""

from functools import cache

import pytest
import torch
from torch import nn

from passes.blocks.blocks import find_blocks
from passes.canonical.masks import simplify_masks
from passes.program.program import Program
from planner.api import plan
from planner.capture.export import capture
from tests.models.loose_layers import BODIES, EncoderDecoder, GatheredLoss, einsums, pieces
from tests.models.small import VOCABULARY, WIDTH, Body, Model, tokens
from tests.passes.blocks.test_blocks import kinds, ops, paths
from tests.tools.stages_in_turn import check_equals_whole, stage_of_parameter, stages_of

MODELS = {**BODIES, "encoder_decoder": EncoderDecoder, "gathered_loss": GatheredLoss}


def model_of(name: str) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name]()
        return Model(model) if isinstance(model, Body) else model


@cache
def program_of(name: str) -> Program:
    program = capture(model_of(name), {"input_ids": tokens(), "labels": tokens()})
    simplify_masks(program)
    return program


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pieces", [0, 0, 0]),
        ("einsums", [0, 0]),
        ("two_lists", [0, 1, 0, 1, 0, 1]),
        ("two_lists_and_norms", [0, 0, 0]),
        ("next_norm", [0, 0, 0]),
        ("shared", [0] * 4),
        ("transposed", [0] * 3),
        ("hoisted", [0] * 3),
        ("loops", [0] * 6),
        ("experts", [0, 0]),
        ("alternating", [0, 1, 0, 1, 0]),
        ("first_differs", [0, 1, 1, 1]),
        ("encoder_decoder", [0] * 3 + [1] * 3),
        ("gathered_loss", [0, 1, 1, 1]),
    ],
)
def test_the_layers_are_the_blocks(name: str, expected: list[int]) -> None:
    assert kinds(find_blocks(program_of(name))) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_nodes_of_one_kind_correspond_one_to_one(name: str) -> None:
    program = program_of(name)
    blocks = find_blocks(program)
    first = {block.kind: block for block in reversed(blocks.instances)}
    for block in blocks.instances:
        model = first[block.kind]
        assert [blocks.representative[n] for n in block.nodes] == list(model.nodes)
        assert ops(program, block.nodes) == ops(program, model.nodes)
    for node in program.graph.graph.nodes:
        reader = program.node(blocks.representative[node.name])
        assert len(node.all_input_nodes) == len(reader.all_input_nodes)
        if node.name not in program.inputs and node.op != "output":
            assert str(node.meta["val"]) == str(reader.meta["val"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "crossing"), [*((name, 1) for name in BODIES), ("gathered_loss", 2), ("encoder_decoder", 2)]
)
def test_what_crosses_a_cut_is_the_residual_and_what_passes_through(name: str, crossing: int) -> None:
    program = program_of(name)
    live = stages_of(program, len(find_blocks(program).instances)).live
    assert max(map(len, live)) == crossing
    for cut in live:
        assert (2, 16, WIDTH) in [tuple(program.node(n).meta["val"].shape) for n in cut]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_turn_compute_the_loss_of_the_whole_graph(name: str) -> None:
    program = program_of(name)
    for pp in {2, len(find_blocks(program).instances)}:
        check_equals_whole(program, stages_of(program, pp))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_planned_over_two_stages_of_two_ranks(name: str) -> None:
    spec = {
        "mesh": {"tp": 2, "pp": 2},
        "batch": {"global": 8, "micro": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "inputs": {"input_ids": {"shape": [16], "dtype": "int64", "high": VOCABULARY}, "labels": {"like": "input_ids"}},
    }
    assert len(plan(model_of(name), spec).stages) == 2


def test_a_private_parameter_maps_to_that_of_the_first_layer() -> None:
    program = program_of("transposed")
    representative = find_blocks(program).representative
    fqns = program.parameters
    mapped = {fqns[name]: fqns[representative[name]] for name in fqns}
    assert mapped["body.up.2"] == "body.up.0"
    assert mapped["body.down.1"] == "body.down.0"
    assert mapped["head.weight"] == "head.weight"


def test_weights_that_all_layers_share_map_to_themselves() -> None:
    program = program_of("shared")
    blocks = find_blocks(program)
    assert all(blocks.representative[name] == name for name in program.parameters)
    assert paths(blocks) == ["body.w"] * 4


def test_a_path_is_what_the_names_of_a_layers_weights_share() -> None:
    assert paths(find_blocks(program_of("pieces"))) == [f"body.layers.{i}" for i in range(3)]
    assert paths(find_blocks(program_of("encoder_decoder"))) == [
        f"{side}.{i}" for side in ("encoder", "decoder") for i in range(3)
    ]
    assert paths(find_blocks(program_of("einsums"))) == ["body block 0", "body block 1"]


def test_names_decide_nothing() -> None:
    with torch.device("meta"):
        model = Model(einsums(3))
    model.body.register_module("zz", model.body.w)
    program = capture(model, {"input_ids": tokens(), "labels": tokens()})
    program.parameters.update((name, f"p{i}") for i, name in enumerate(program.parameters))
    for node in program.graph.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    assert kinds(find_blocks(program)) == [0, 0, 0]


def test_a_loss_gathered_over_layers_is_sent_and_a_weight_of_the_loss_waits_for_it() -> None:
    program = program_of("gathered_loss")
    stages = stages_of(program, 4)
    assert [sorted(program.node(n).meta["val"].dim() for n in cut) for cut in stages.live] == [[0, 3]] * 3
    assert stage_of_parameter(program, stages, "weight.weight") == (3,)


def test_layers_with_dropout_are_found() -> None:
    body = pieces()
    run = body.run
    body.drop = nn.Dropout(0.1)
    body.run = lambda own, x: own.drop(run(own, own.drop(x)))
    program = capture(Model(body).to("meta"), {"input_ids": tokens(), "labels": tokens()})
    assert kinds(find_blocks(program)) == [0, 0, 0]
