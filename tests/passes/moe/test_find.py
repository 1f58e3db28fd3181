"""Experts are found in families and spellings that nobody listed, with all that they are made of.

That the record is right is shown by numbers: change expert e's part of each weight, and the combined outputs that
change are those of the tokens that chose e.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from passes.moe.find import find_experts
from passes.moe.layers import Dispatch, ExpertLayer
from passes.program.program import Program
from planner.capture.export import capture
from tests.models import experts, hashed_experts, hugging_face, routers, selected_rows, sorted_experts
from tests.models.hugging_face import MOE
from tests.tools.captures import program_again
from tests.tools.examples import examples

LISTED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
MORE = ("olmoe", "granitemoe", "phimoe", "llama4", "ernie", "mixtral with its loss")
PLAIN = {way.__name__: way for way in experts.WAYS}


@cache
def made(name: str) -> tuple[Program, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    if name in PLAIN:
        model, batch = experts.Net(experts.Layer(PLAIN[name])), experts.batch()
    else:
        model = hugging_face.made(MOE[name])
        batch = hugging_face.batch("mixtral")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return program_again(model, batch), model, batch


def layers_of(name: str) -> tuple[ExpertLayer, ...]:
    found = find_experts(made(name)[0])
    assert found.doubts == ()
    return found.layers


def words(*names: str) -> str:
    lines: list[str] = []
    for name in names:
        layers = layers_of(name)
        layer = layers[0]
        sizes = f"{layer.num_experts} experts, {layer.top_k} a token, {layer.dispatch}, {layer.capacity}"
        lines.append(f"{name}: {len(layers)} x {sizes}")
        made = f"{' '.join(layer.chosen)}, {' '.join(layer.probs)} -> {layer.combined}"
        lines.append(f"{layer.tokens} -> {layer.logits} -> {made}")
        lines += [f"{len(w.nodes)} {list(w.shape)} experts {w.dim} width {w.width}" for w in layer.weights]
    return "\n".join(lines) + "\n"


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*LISTED, *MORE])
def test_stacks_of_a_family_are_cut_between_experts_and_along_their_width(name):
    layers = layers_of(name)
    assert [(x.num_experts, x.top_k) for x in layers] == [(4, 1 if name == "llama4" else 2)] * len(layers)
    assert len(layers) == (1 if name == "deepseek_v3" else 2)
    for layer in layers:
        up, down = layer.weights[:2]
        assert up.dim == down.dim == 0
        assert up.shape[3 - up.width] == down.shape[3 - down.width] == hugging_face.WIDTH
        assert up.shape[up.width] == 2 * down.shape[down.width]
        assert [(w.dim, w.width) for w in layer.weights[2:]] == [(0, -1)] * (2 if name == "gpt_oss" else 0)
        assert layer.dispatch == (Dispatch.EVERY_TOKEN if name == "llama4" else Dispatch.OFFSETS)
        assert len(layer.router) == len(layer.chosen) == len(layer.probs) == 1


# ---- by numbers


def changed_rows(name: str, layer: ExpertLayer, expert: int) -> tuple[Tensor, Tensor]:
    """Of each token: whether its combined output changes with the expert's weights, and whether it chose the expert."""
    program, model, batch = made(name)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def values(change: bool) -> dict[str, Tensor]:
        given: list[Tensor] = []
        for node in program.graph.graph.find_nodes(op="placeholder"):
            key = program.parameters.get(node.name) or program.buffers.get(node.name)
            value = own[key] if key else batch[node.name] if node.name in batch else program.constants[node.name]
            value = value.detach().clone()
            for weight in layer.weights if change else ():
                if node.name in weight.nodes:
                    stack = weight.dim >= 0
                    part = value.select(weight.dim, expert) if stack else value
                    part.add_(1.0 if stack or weight.nodes[expert] == node.name else 0.0)
            given.append(value)
        torch.manual_seed(5)
        recorder = _Recorder(program.graph)
        recorder.run(*given)
        return recorder.values

    with torch.no_grad():
        before, after = values(False), values(True)
    tokens = before[layer.combined].reshape(-1, before[layer.tokens].shape[-1])
    rows = (tokens - after[layer.combined].reshape(tokens.shape)).abs().amax(-1) > 1e-6
    chosen = torch.cat([before[ids].reshape(len(tokens), -1) for ids in layer.chosen], -1)
    return rows, (chosen == expert).any(-1)


class _Recorder(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        self.values[n.name] = value = super().run_node(n)
        return value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*PLAIN, *LISTED, *MORE])
def test_tokens_that_chose_an_expert_change_with_its_weights_and_no_others(name):
    layer = layers_of(name)[0]
    seen = 0
    for expert in range(layer.num_experts):
        rows, chose = changed_rows(name, layer, expert)
        seen += int(rows.sum())
        if layer.capacity:
            assert not (rows & ~chose).any()
        else:
            assert rows.tolist() == chose.tolist()
    assert seen == layer.top_k * len(rows) or (layer.capacity and 0 < seen <= layer.num_experts * layer.capacity)


# ---- plain models


def test_golden_of_stacks():
    assert_expected_inline(
        words("stacked", "copied", "looked_up", "slots"),
        """\
stacked: 1 x 4 experts, 2 a token, every token, weighted, 0
layer_norm -> linear -> getitem_1, scatter -> einsum_2
1 [4, 8, 12] experts 0 width 2
1 [4, 12, 8] experts 0 width 1
copied: 1 x 4 experts, 2 a token, every token, weighted, 0
layer_norm -> linear -> getitem_1, sum_1 -> sum_2
1 [4, 8, 12] experts 0 width 2
1 [4, 12, 8] experts 0 width 1
looked_up: 1 x 4 experts, 2 a token, matrices of each token, 0
layer_norm -> linear -> getitem_1, getitem -> sum_1
1 [4, 8, 12] experts 0 width 2
1 [4, 12, 8] experts 0 width 1
slots: 1 x 4 experts, 2 a token, slots of each expert, 3
layer_norm -> linear -> getitem_1, einsum_2 -> einsum_6
1 [4, 8, 12] experts 0 width 2
1 [4, 12, 8] experts 0 width 1
""",
    )


def test_golden_of_loops():
    assert_expected_inline(
        words("masks", "columns", "picked"),
        """\
masks: 1 x 4 experts, 2 a token, every token, weighted, 0
layer_norm -> linear -> getitem_1, sum_1 sum_2 sum_3 sum_4 -> add_3
4 [12, 8] experts -1 width 0
4 [8, 12] experts -1 width 1
4 [8] experts -1 width -1
4 [12] experts -1 width -1
columns: 1 x 4 experts, 2 a token, every token, weighted, 0
layer_norm -> linear -> getitem_1, select select_2 select_4 select_6 -> add_3
4 [12, 8] experts -1 width 0
4 [8, 12] experts -1 width 1
4 [8] experts -1 width -1
4 [12] experts -1 width -1
picked: 1 x 4 experts, 2 a token, every token, weighted, 0
layer_norm -> linear -> getitem_1, getitem -> sum_1
4 [12, 8] experts -1 width 0
4 [8, 12] experts -1 width 1
4 [8] experts -1 width -1
4 [12] experts -1 width -1
""",
    )


@pytest.mark.thorough
def test_golden_of_families():
    assert_expected_inline(
        words("mixtral", "gpt_oss", "deepseek_v3", "llama4"),
        """\
mixtral: 2 x 4 experts, 2 a token, tokens sorted by expert, 0
mul_10 -> linear_4 -> getitem_1, div_ -> sum_2
1 [4, 128, 32] experts 0 width 1
1 [4, 32, 64] experts 0 width 2
gpt_oss: 2 x 4 experts, 2 a token, tokens sorted by expert, 0
mul_15 -> linear_8 -> getitem_7, softmax_1 -> sum_1
1 [4, 32, 128] experts 0 width 2
1 [4, 64, 32] experts 0 width 1
1 [4, 128] experts 0 width -1
1 [4, 32] experts 0 width -1
deepseek_v3: 1 x 4 experts, 2 a token, tokens sorted by expert, 0
mul_35 -> linear_13 -> getitem_17, mul_36 -> sum_3
1 [4, 64, 32] experts 0 width 1
1 [4, 32, 32] experts 0 width 2
llama4: 2 x 4 experts, 1 a token, every token, weighted, 0
mul_9 -> linear_4 -> getitem_1, sigmoid -> sum_1
1 [4, 32, 128] experts 0 width 2
1 [4, 64, 32] experts 0 width 1
""",
    )


@pytest.mark.thorough
@examples(25)
@given(
    way=st.sampled_from(experts.WAYS),
    num_experts=st.integers(2, 9),
    hidden=st.integers(2, 9),
    width=st.integers(2, 9),
    data=st.data(),
)
def test_sizes_that_are_equal_or_odd_do_not_confuse(way, num_experts, hidden, width, data):
    top_k = data.draw(st.integers(1, num_experts - 1))
    layer = experts.Layer(way, hidden, width, num_experts, top_k)
    found = find_experts(capture(experts.Net(layer, hidden), experts.batch()))
    assert found.doubts == ()
    (only,) = found.layers
    up, down = only.weights[:2]
    is_loop = way in experts.LOOPS
    assert (only.num_experts, only.top_k, only.weights[0].dim >= 0) == (num_experts, top_k, not is_loop)
    assert (up.shape[-2:], down.shape[-2:]) == (
        ((width, hidden), (hidden, width)) if is_loop else ((hidden, width), (width, hidden))
    )
    if is_loop:
        assert (up.width, down.width, len(up.nodes)) == (0, 1, num_experts)
    else:
        assert (up.dim, up.width, down.dim, down.width) == (0, 2, 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("way", selected_rows.WAYS, ids=lambda way: way.__name__)
def test_loops_over_selected_rows_are_branches(way):
    """Also one that visits experts once for each choice, or that guards what may divide by zero."""
    found = find_experts(capture(experts.Net(selected_rows.Selecting(way)), experts.batch()))
    assert found.doubts == ()
    (only,) = found.layers
    assert (only.num_experts, only.top_k, only.weights[0].dim >= 0, only.tokens) == (4, 2, False, "layer_norm")
    assert sorted(w.width for w in only.weights if len(w.shape) == 2) == [0, 0, 1]
    assert len(only.probs) in (1, 4, 8)


# ---- what is none


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", experts.NO_EXPERTS, ids=lambda layer: layer.__name__)
def test_what_chooses_something_else_is_no_layer_of_experts(layer):
    found = find_experts(capture(experts.Net(layer()), experts.batch()))
    assert (found.layers, found.doubts) == ((), ())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (experts.Differing, "the branches of its 4 numbers differ from each other"),
        (experts.Missing, "they have weights for 3 of its 4 numbers, in 3 branches"),
        (experts.OfOthers, "its 4 experts read 2 values, not only the tokens"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_not_understood_is_told_with_its_line(layer: Callable[[], nn.Module], why: str):
    found = find_experts(capture(experts.Net(layer()), experts.batch()))
    assert found.layers == ()
    assert [doubt.why for doubt in found.doubts] == [why]
    assert found.doubts[0].where.file.endswith("experts.py")
    assert "topk" in found.doubts[0].where.code


# ---- routers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", hashed_experts.NUMBERS, ids=lambda n: n.__name__)
def test_numbers_of_tokens_choose_experts_and_labels_none(numbers: hashed_experts.Numbers):
    """Scores are picked for experts and for labels."""
    found = find_experts(capture(hashed_experts.Hashing(numbers, sorted_experts.by_places), experts.batch()))
    assert found.doubts == ()
    (layer,) = found.layers
    assert (layer.num_experts, layer.top_k) == (4, 1 if numbers is hashed_experts.of_one else 2)
    assert layer.router == ("p_layer_gate_weight",)
    assert layer.chosen == ("remainder" if numbers is hashed_experts.computed else "index",)


@pytest.mark.sampled(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("score", routers.SCORES, ids=lambda s: s.__name__)
def test_a_router_with_a_computed_weight_is_one_with_a_weight(score: routers.Score, dtype: torch.dtype):
    """Cast, normed, of low rank, moved by known values: the record is that of a plain router, but for its weights."""
    plain, found = (_routed(s, dtype) for s in (routers.plain, score))
    assert "p_layer_gate_weight" in found.router
    assert replace(found, router=()) == replace(plain, router=())


def _routed(score: routers.Score, dtype: torch.dtype) -> ExpertLayer:
    torch.manual_seed(3)
    model = experts.Net(routers.Routed(score, experts.slots)).to(dtype)
    found = find_experts(program_again(model, experts.batch()))
    assert found.doubts == ()
    return found.layers[0]
