"""The models of the parts, from configs alone: no network, no files beside those of ``examples``."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner import Plan, plan
from planner.capture.model.reference import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("gpt2", "llama", "bert")
DROPOUT = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
LENGTH, SEQUENCES, VOCABULARY = 64, 8, 257


def small(name: str, *, dropout: bool = False) -> nn.Module:
    """One of ``SMALL`` with real weights, the same in every process and at every call."""
    config = json.loads((EXAMPLES / f"{name}_small.json").read_text())
    return _of(config | (DROPOUT[name] if dropout else {}), materialize=True).train()


def llama(*, tiny: bool, attention_dropout: float, window: int | None = None) -> tuple[nn.Module, dict[str, int]]:
    """A Llama of 1.1 billion parameters on meta, and its sizes; ``tiny`` for a look at the code.

    ``window``: a Mistral of that shape; a token reads so many keys.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048}
    if tiny:
        sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 32}
    name = "Llama" if window is None else "Mistral"
    config = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "sliding_window": window}
    return _of(config | sizes | {"attention_dropout": attention_dropout}, materialize=False).train(), sizes


def gpt2(*, tiny: bool) -> tuple[nn.Module, int, int]:
    """A GPT-2 of 12 layers, width 768, with short kernels at one sequence; its length and its vocabulary."""
    length, vocabulary = (16, 257) if tiny else (128, 50257)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": length,
        "vocab_size": vocabulary,
    }
    config |= {"n_embd": 64, "n_layer": 2, "n_head": 2} if tiny else {"n_embd": 768, "n_layer": 12, "n_head": 12}
    return _of(config, materialize=False).eval(), length, vocabulary


MINIATURES: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH},
    "llama": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "intermediate_size": 64, "num_local_experts": 4},
}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def miniature(name: str, layers: int = 4) -> nn.Module:
    """One of ``MINIATURES``: heads of 8 features, as flash kernels take them, real weights and no dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "gpt2":
        sizes = {"n_layer": layers} | dict.fromkeys(DROPOUTS, 0.0)
    given = {"model_type": name, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False}
    return _of(given | MINIATURES[name] | sizes, materialize=True).train()


class LoopedExperts(nn.Module):
    """A residual network with experts in a loop over a ModuleList, each over the tokens that chose it."""

    def __init__(self, width: int, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(ExpertLayer(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class ExpertLayer(nn.Module):
    """8 experts, 2 a token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            y = y.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return y.view_as(x)


def looped_experts(*, tiny: bool) -> tuple[nn.Module, int, int]:
    """4 layers of 1024 → 4096 → 1024 on meta; the length of its sequences and its vocabulary."""
    width, hidden, layers, length, vocabulary = (32, 64, 2, 16, 257) if tiny else (1024, 4096, 4, 1024, 32000)
    with torch.device("meta"):
        return LoopedExperts(width, hidden, layers, vocabulary).train(), length, vocabulary


def planned(model: nn.Module, mesh: dict[str, int] | None = None, **rest: Any) -> Plan:
    """A plan for one of ``SMALL``: two microbatches for each dp rank, clipping."""
    mesh = mesh or {}
    tokens = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    spec = {"mesh": mesh, "batch": {"global": SEQUENCES, "micro": SEQUENCES // (2 * mesh.get("dp", 1))}}
    spec |= {"inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": {"clip_grad_norm": 1.0, "lr": 1e-3}}
    return plan(model, spec | rest)


def batch(
    step: int, sequences: int = SEQUENCES, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """A global batch; a fifth of the labels is ignored."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(vocabulary, (2, sequences, length), generator=generator)
    ignored = torch.rand((sequences, length), generator=generator) < 0.2
    return {"input_ids": ids[0], "labels": ids[1].masked_fill(ignored, -100)}


def from_config(config: dict[str, Any]) -> nn.Module:
    """A model on meta."""
    return _of(config, materialize=False)


def _of(config: dict[str, Any], *, materialize: bool) -> nn.Module:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        return load_model(f"hf:{directory}", materialize=materialize, seed=0)
