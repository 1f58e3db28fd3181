"""A packed batch trains as its documents one by one: loss and every gradient, on every layout."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from passes.ops import documents as ops
from passes.ops.document_blocks import CAUSAL, WHOLE, KeyBlock
from passes.ops.gathered_attention import gathered_attention
from passes.program.ops.aten import tensors_of
from planner.lower import lower
from planner.spec.inputs import NAMES, DataSpec
from runtime.data.objectives.next_token import next_token
from runtime.data.tokens import Tokens
from tests.models.of_documents import FOUND_IN_POSITIONS, LENGTH, VOCABULARY, Attention, build
from tests.numeric.test_half_precision import alone, distance
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import equals_one_process, run_mesh, spec_of
from tests.tools.texts import by_hand

CUT = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, object]]] = {
    "one": ({}, {}),
    "tp2, sequence parallel": ({"tp": 2}, CUT),
    "cp2": ({"cp": 2}, {}),
    "tp2·dp2, recomputed": ({"tp": 2, "dp": 2}, {"recompute": "full"}),
    "cp2·tp2·dp2": ({"cp": 2, "tp": 2, "dp": 2}, {}),
}
TAKEN = {"own": "document_ids", "own, of ends": "cu_seqlens", "own, of a mask": "document_mask"}
INPUTS = {name: ("tokens", "targets", "position_ids", last) for name, last in TAKEN.items()}
SHAPES = {"cu_seqlens": (6,), "document_mask": (1, LENGTH, LENGTH)}
OF_HUGGING_FACE = ("input_ids", "labels", "position_ids")
INPUTS["modernbert"] = (*OF_HUGGING_FACE, "document_ids")


def documents(seed: int, count: int = 40) -> list[list[int]]:
    """From one token to a whole sequence, and longer ones."""
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCABULARY, n).tolist() for n in draw.integers(1, LENGTH + 4, count)]


def packed(text: Tokens, names: tuple[str, ...], rows: int) -> dict[str, Tensor]:
    roles = {name: NAMES[name] for name in names}
    shapes = {role: SHAPES.get(role, (LENGTH,)) for role in roles.values()}
    objective = next_token(text, LENGTH, DataSpec(packing="documents"), 1, shapes)
    found = [objective.sample(i, 0) for i in range(rows)]
    return {name: torch.from_numpy(np.stack([s[role] for s in found])) for name, role in roles.items()}


def one_by_one(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens that count, of documents alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(batch["position_ids"])):
        starts = [i for i, p in enumerate(batch["position_ids"][row].tolist()) if p == 0]
        for a, b in zip(starts, [*starts[1:], LENGTH], strict=True):
            alone = {name: x[row : row + 1, a:b] for name, x in batch.items()}
            known = {
                "document_ids": torch.zeros(1, b - a, dtype=torch.int64),
                "cu_seqlens": torch.tensor([[0, b - a]]),
                "document_mask": torch.ones(1, 1, b - a, b - a, dtype=torch.bool).tril(),
            }
            alone |= {name: x for name, x in known.items() if name in batch}
            asked = next(x for name, x in alone.items() if name in ("targets", "labels"))
            if (number := int((asked != -100).sum())) > 0:
                returned = model(**alone)
                loss = returned if isinstance(returned, Tensor) else returned.loss
                total, count = total + loss.double() * number, count + number
    return total / count


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[KeyBlock]:
    """Those that attention computes one by one, however small they are."""
    found: list[KeyBlock] = []
    attended = ops._attended

    def seen(block: KeyBlock, *given: Any) -> Tensor:
        found.append(block)
        return attended(block, *given)

    monkeypatch.setattr(ops, "CALL", 0)
    monkeypatch.setattr(ops, "_attended", seen)
    return found


def check_blocks(blocks: list[KeyBlock], of_chunks: bool, is_bidirectional: bool) -> None:
    """Those of the run: causal ones of chunks read keys of chunks before them."""
    if is_bidirectional:  # and some layers have a window of both sides
        assert WHOLE in {block.band for block in blocks}
        assert any(block.band is not None and min(block.band) > 0 for block in blocks)
        return
    causal = [block for block in blocks if block.band == CAUSAL]
    assert any(block.is_square for block in causal)
    assert any(not block.is_square for block in causal) is of_chunks


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        *TAKEN,
        *(pytest.param(name, marks=[pytest.mark.thorough] * (name == "gemma2")) for name in FOUND_IN_POSITIONS),
        "modernbert",
    ],
)
def test_a_packed_batch_trains_as_its_documents_one_by_one(name: str, layout: str, blocks: list[KeyBlock]) -> None:
    mesh, more = LAYOUTS[layout]
    batch = packed(by_hand(*documents(1)), INPUTS.get(name, OF_HUGGING_FACE), 2 * mesh.get("dp", 1))
    limit = 1e-10 if name in TAKEN else 1e-5  # Hugging Face computes the loss in float32
    ran = equals_one_process(
        lambda: build(name),
        batch,
        mesh,
        loss=limit,
        gradient=limit,
        alone=lambda model: one_by_one(model, batch),
        data={"packing": "documents"},
        **more,
    )
    if name == "gemma2":  # it spells its attention out, and caps the scores
        assert not ran.plan.to_run()[0].lowering.documents.attentions
    else:
        check_blocks([block for block in blocks if block.sequence >= 0], "cp2" in layout, name == "modernbert")


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", ["own", "own, of ends", "modernbert"])
def test_in_bfloat16_a_layout_rounds_no_more_than_one_process(name: str, mesh: dict[str, int]) -> None:
    batch = packed(by_hand(*documents(1)), INPUTS[name], 2 * mesh.get("dp", 1))
    truth, plain = (alone(build(name).to(dtype), batch) for dtype in (torch.float64, torch.bfloat16))
    found = run_mesh(lambda: build(name).bfloat16(), batch, mesh, data={"packing": "documents"}).gradients
    assert distance(found, truth) <= 1.5 * distance(plain, truth)


class Long(nn.Module):
    """One layer over tokens of documents, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(VOCABULARY, 8), Attention(8, 2)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor, document_ids: Tensor) -> Tensor:
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        mask = (causal & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]
        x = self.tokens(tokens) + self.attention(self.tokens(tokens), mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_the_graph_of_a_cp_rank_has_no_value_of_the_square_of_32k_tokens() -> None:
    length, cp = 32768, 8
    with torch.device("meta"):
        model, batch = (
            Long(),
            {name: torch.zeros(2, length, dtype=torch.int64) for name in INPUTS["own"] if "p" not in name},
        )
    made = plan_again(model, spec_of(batch, {"cp": cp}, data={"packing": "documents"}))
    (stage,) = lower(made, 3, torch.device("cpu")).stages
    values = [x for node in stage.module.graph.nodes for x in tensors_of(node)]
    assert max(x.numel() for x in values) < length**2 // cp // 16


def test_a_mask_that_is_an_input_is_read_as_a_whole_over_cp() -> None:
    batch = packed(by_hand(*documents(1)), INPUTS["own, of a mask"], 2)
    made = plan_again(build("own, of a mask"), spec_of(batch, {"cp": 2}, data={"packing": "documents"}))
    (stage,) = lower(made, 1, torch.device("cpu")).stages
    calls = list(stage.module.graph.find_nodes(op="call_function", target=gathered_attention))
    assert calls
    assert all("documents" in call.kwargs and "rows" not in call.kwargs for call in calls)


@pytest.mark.thorough
def test_with_its_cache_on_a_model_that_ignores_documents_is_refused() -> None:
    model = build("llama")
    model.config.use_cache = True
    with pytest.raises(PlanError, match="with its key-value cache on, the model's loss is") as error:
        plan_again(model, spec_of(packed(by_hand(*documents(1)), OF_HUGGING_FACE, 2), {}))
    assert "set model.config.use_cache = False" in error.value.fix


class Deaf(nn.Module):
    """It takes positions, and attends over the ends of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("own")

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(tokens, targets, position_ids, torch.zeros_like(tokens))


@pytest.mark.thorough
def test_an_attention_over_the_ends_of_documents_is_refused_with_its_line() -> None:
    text, packing = by_hand(*documents(1)), {"data": {"packing": "documents"}}
    plan_again(build("own"), spec_of(packed(text, INPUTS["own"], 2), {}, **packing))
    batch = packed(text, INPUTS["own"][:3], 2)
    plan_again(Deaf(), spec_of(batch, {}))
    with pytest.raises(PlanError, match="this attention does not read position_ids") as error:
        plan_again(Deaf(), spec_of(batch, {}, **packing))
    assert "scaled_dot_product_attention" in str(error.value.where)
