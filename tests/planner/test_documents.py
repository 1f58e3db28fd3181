"""With packed documents, an op by which the loss of one depends on another is refused at planning, and no other op."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from planner import plan
from planner.api import find_layouts
from planner.documents import SHORT
from tests.models.of_mixers import APART, MIXED, VOCABULARY, Mixing

OPS = {
    "running_sum": "cumsum",
    "fourier": "fft",
    "centred": "mean",
    "linear_attention": "matmul",
    "joined_shift": "cat",
}


def spec(length: int = 12, *names: str, **more: Any) -> dict[str, Any]:
    inputs = names or ("tokens", "targets", "position_ids")
    return {
        "mesh": {},
        "batch": {"global": 2, "micro": 2},
        "inputs": {name: {"shape": [length], "dtype": "int64"} for name in inputs},
        "data": {"packing": "documents"},
    } | more


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MIXED)
def test_an_op_that_reads_tokens_of_another_document_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(PlanError, match="lets a token change the loss of another document") as error:
        plan(Mixing(MIXED[name]), spec())
    assert OPS.get(name, "slice") in error.value.what
    assert "of_mixers.py" in str(error.value.where)
    assert "several lengths" in error.value.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", APART)
def test_an_op_that_masks_what_it_reads_of_another_document_is_accepted(name: str) -> None:
    plan(Mixing(APART[name]), spec())


def test_without_packed_documents_tokens_are_mixed() -> None:
    plan(Mixing(MIXED["shift"]), spec(data={}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["shift", "masked_shift"])
def test_long_sequences_are_checked_by_short_ones(name: str) -> None:
    model = Mixing(MIXED.get(name) or APART[name])
    if name in APART:
        plan(model, spec(4 * SHORT))
    else:
        with pytest.raises(PlanError, match="lets a token change the loss"):
            plan(model, spec(4 * SHORT))


def test_a_search_refuses_it_too() -> None:
    asked = spec(mesh="auto", devices=2, cluster="dgx-h100")
    with pytest.raises(PlanError, match="lets a token change the loss"):
        find_layouts(Mixing(MIXED["shift"]), asked)


class Bigrams(nn.Module):
    """It looks up each token together with the one before it."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.pairs, self.head, self.masks = nn.Embedding(VOCABULARY**2, 8), nn.Linear(8, VOCABULARY), masks

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor) -> Tensor:
        before = F.pad(tokens, (1, 0))[:, :-1]
        before = before * (position_ids > 0) if self.masks else before
        x = self.pairs(tokens * VOCABULARY + before)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


def test_integers_made_of_tokens_may_not_read_another_document() -> None:
    plan(Bigrams(masks=True), spec())
    with pytest.raises(PlanError, match="lets a token change the loss"):
        plan(Bigrams(masks=False), spec())


class Balanced(nn.Module):
    """Its labels are shifted inside, its last input has no label; its loss has means over all tokens beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.router, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 4), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids[:, :-1])
        probs = self.router(x).softmax(-1)
        counts = F.one_hot(probs.argmax(-1), 4).float().flatten(0, 1).mean(0)
        logits, wanted = self.head(x * probs.amax(-1, keepdim=True)), labels[:, 1:]
        rows = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="none")
        counted = (wanted != -100).float().flatten()
        loss = (rows * counted / counted.sum()).sum()
        spread = (probs.flatten(0, 1) - probs.flatten(0, 1).mean(0)).square().mean()
        balance = (counts * probs.flatten(0, 1).mean(0)).sum()
        return loss + balance + 0.01 * spread + logits.logsumexp(-1).square().mean()


def test_means_in_the_loss_and_shifted_labels_may_read_all_documents() -> None:
    plan(Balanced(), spec(12, "input_ids", "labels", "position_ids"))


HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "bamba": MAMBA | {"attn_layer_indices": []},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba"], "shared_intermediate_size": 32},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8}
    | {"n_groups": 2, "layers_block_type": ["mamba"]},
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent"], "attention_window_size": 8},
    "lfm2": {"layer_types": ["conv"]},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4, "layer_types": ["sliding_attention"]},
    "qwen3_moe": EXPERTS | {"output_router_logits": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def family(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    more = {"num_key_value_heads": 2, "use_cache": False} | ({} if kind == "mamba2" else {"head_dim": 8})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | ids | more | FAMILIES[kind])))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_of_transformers_are_accepted(kind: str) -> None:
    plan(family(kind), spec(12, "input_ids", "labels", "position_ids"))


@pytest.mark.thorough
def test_windows_of_transformers_that_read_no_positions_are_refused() -> None:
    with pytest.raises(PlanError, match="matmul lets a token change the loss of another document") as error:
        plan(family("gpt_oss"), spec(12, "input_ids", "labels", "position_ids"))
    assert "modeling_" in str(error.value.where)


@pytest.mark.thorough
def test_an_attention_of_the_width_of_a_large_model_is_tried() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "intermediate_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=99, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan(model, spec(4096, "input_ids", "labels", "position_ids"))
