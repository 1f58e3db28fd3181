"""Small models for planning, all on the meta device: four Hugging Face families, and layers of our own to arrange."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.program.program import Program
from tests.tools.captures import program_again

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 16, 32, 96


def tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


@cache
def hugging_face(family: str, num_layers: int = 3) -> Program:
    """A small captured model of ``family`` with ``num_layers`` layers (t5: of each kind) and its loss."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    if family == "gpt2":
        config, kind = transformers.GPT2Config(**sizes, n_positions=LENGTH), transformers.GPT2LMHeadModel
    elif family == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2)
        kind = transformers.LlamaForCausalLM
    elif family == "bert":
        config, kind = transformers.BertConfig(**sizes, intermediate_size=64), transformers.BertForMaskedLM
    else:
        config = transformers.T5Config(
            num_layers=num_layers,
            d_model=WIDTH,
            d_ff=64,
            num_heads=4,
            d_kv=8,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        kind = transformers.T5ForConditionalGeneration
    with torch.device("meta"):
        model = kind(config).train()
    inputs = {"input_ids": tokens(), "labels": tokens()}
    return program_again(model, inputs | ({"attention_mask": tokens()} if family == "bert" else {}))


class Layer(nn.Module):
    """Residual attention by hand and an MLP ``wide`` times as wide; ``scale`` differs from layer to layer."""

    def __init__(self, wide: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, wide * WIDTH), nn.Linear(wide * WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        scores = (self.q(y) @ self.k(y).transpose(1, 2)) * self.scale
        x = x + self.o(scores.softmax(-1) @ self.v(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, whatever ``body`` makes of it, head and loss."""

    def __init__(self, body: nn.Module, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary)
        self.body = body

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.tokens(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Body(nn.Module):
    """``run(self, x)`` over the modules given as attributes."""

    def __init__(self, run: Callable[[Body, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_order(body: Body, x: Tensor) -> Tensor:
    """One after the other: every attribute, and every member of one that is a list or dict."""
    for child in body.children():
        for member in child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]:
            x = member(x)
    return x


def captured(build: Callable[[], nn.Module], vocabulary: int = VOCABULARY) -> Program:
    """The program of a Model around the body that ``build`` makes."""
    with torch.device("meta"):
        model = Model(build(), vocabulary)
    return program_again(model, {"input_ids": tokens(), "labels": tokens()})


def layers(num_layers: int) -> Callable[[], nn.Module]:
    return lambda: Body(in_order, layers=nn.ModuleList(Layer() for _ in range(num_layers)))
