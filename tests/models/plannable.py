"""Small models with real weights to plan and run: four families, and layers of our own with awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT
from tests.models import experts, slots

LENGTH, VOCABULARY, WIDTH = 16, 64, 32


@dataclass(frozen=True)
class Sizes:
    """Attention and MLP sizes of one of our own blocks."""

    heads: int = 4
    key_heads: int = 4
    head_size: int = 8
    inner: int = 64
    by_hand: bool = False  # attention as two products and a softmax
    normed: bool = False  # a norm over the queries of all heads together


class Block(nn.Module):
    """Fused queries, keys and values (key heads may be fewer), MLP; both residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (sizes.heads + 2 * sizes.key_heads) * sizes.head_size)
        self.query_norm = nn.LayerNorm(sizes.heads * sizes.head_size) if sizes.normed else nn.Identity()
        self.out = nn.Linear(sizes.heads * sizes.head_size, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, sizes.inner), nn.Linear(sizes.inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        s, (b, length, _) = self.sizes, x.shape
        parts = self.qkv(self.norm1(x)).split([s.heads * s.head_size, *[s.key_heads * s.head_size] * 2], dim=-1)
        parts = self.query_norm(parts[0]), *parts[1:]
        q, k, v = (part.view(b, length, -1, s.head_size).transpose(1, 2) for part in parts)
        if s.by_hand:
            y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.key_heads)
        x = x + self.out(y.transpose(1, 2).reshape(b, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Blocks of the given sizes between an embedding and a head; ``tail`` runs before the head."""

    def __init__(
        self,
        blocks: list[Sizes],
        tail: Callable[[Tensor], Tensor] | None = None,
        *,
        unused: bool = False,
        penalty: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(sizes) for sizes in blocks)
        self.tail, self.penalty = tail, penalty
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        x = x if self.tail is None else self.tail(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if self.penalty is None else loss + self.penalty(logits)


def sureness(logits: Tensor) -> Tensor:
    """Reads the vocabulary by softmax, log-softmax and logsumexp."""
    return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean() + logits.logsumexp(-1).pow(2).mean()


def earlier_tokens(x: Tensor) -> Tensor:
    """Reads the sequence by a shift and a running sum."""
    return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) + x.cumsum(1) / 10


def balance(logits: Tensor) -> Tensor:
    """A product of means over all tokens, which is no sum over them."""
    probs = logits.softmax(-1).flatten(0, 1)
    return (F.one_hot(probs.argmax(-1), VOCABULARY).to(probs.dtype).mean(0) * probs.mean(0)).sum()


@dataclass(frozen=True)
class Entry:
    make: Callable[[], nn.Module]
    num_layers: int = 2
    inputs: tuple[str, ...] = ("input_ids", "labels")
    vocabulary: int = VOCABULARY
    length: int = LENGTH


def _hugging_face(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=VOCABULARY, **sizes))

    return make


OF_BERT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "intermediate_size": 64,
}
OF_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
OF_MIXTRAL = {**OF_BERT, "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4}


def _llama(key_heads: int) -> Callable[[], nn.Module]:
    return _hugging_face("LlamaForCausalLM", "LlamaConfig", **OF_BERT, num_key_value_heads=key_heads)


MODELS: dict[str, Entry] = {
    "gpt": Entry(lambda: GPT(VOCABULARY, LENGTH, WIDTH, 4, 4), 4, ("input_ids", "targets")),
    "gpt2": Entry(_hugging_face("GPT2LMHeadModel", "GPT2Config", **OF_GPT2)),
    "llama": Entry(_llama(2)),
    "llama, one key head": Entry(_llama(1)),
    "bert": Entry(_hugging_face("BertForMaskedLM", "BertConfig", **OF_BERT)),
    "fused, one key head": Entry(lambda: Decoder([Sizes(key_heads=1)] * 2)),
    "three heads": Entry(lambda: Decoder([Sizes(heads=3, key_heads=3)] * 2)),
    "three heads by hand": Entry(lambda: Decoder([Sizes(heads=3, key_heads=3, by_hand=True)] * 2)),
    "three heads, then four": Entry(lambda: Decoder([Sizes(heads=3, key_heads=3), Sizes()] * 2), 4),
    "inner 33": Entry(lambda: Decoder([Sizes(inner=33)] * 2)),
    "no rule": Entry(lambda: Decoder([Sizes()] * 2, tail=lambda x: x + torch.linalg.qr(x).Q.sum(-1, keepdim=True))),
    "normed queries": Entry(lambda: Decoder([Sizes(normed=True)] * 2)),
    "balance": Entry(lambda: Decoder([Sizes()] * 2, penalty=balance)),
    "sureness": Entry(lambda: Decoder([Sizes()] * 2, penalty=sureness)),
    "earlier tokens": Entry(lambda: Decoder([Sizes()] * 2, tail=earlier_tokens)),
    "mixtral": Entry(_hugging_face("MixtralForCausalLM", "MixtralConfig", **OF_MIXTRAL, num_experts_per_tok=2)),
    "loop of experts": Entry(lambda: experts.Net(experts.Layer(experts.masks)), 1, vocabulary=experts.VOCABULARY),
    "slots of experts": Entry(lambda: experts.Net(slots.Slots(slots.one_hot)), 1, vocabulary=experts.VOCABULARY),
    "fifteen tokens": Entry(lambda: Decoder([Sizes()] * 2), length=15),
    "unused": Entry(lambda: Decoder([Sizes()] * 2, unused=True)),
}


def build(name: str) -> nn.Module:
    """The model with equal weights in every process."""
    torch.manual_seed(0)
    return MODELS[name].make().eval()


def spec_of(name: str, **changes: Any) -> dict[str, Any]:
    """A spec of 8 sequences, 2 a microbatch (1 with dp); ``changes`` replace sections."""
    dp = changes.get("mesh", {}).get("dp", 1)
    given = {"shape": [MODELS[name].length], "dtype": "int64", "high": MODELS[name].vocabulary}
    return {
        "batch": {"global": 8, "micro": 2 // dp if dp < 2 else 1},
        "inputs": dict.fromkeys(MODELS[name].inputs, given),
        **changes,
    }
