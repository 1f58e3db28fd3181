"""A GPT that takes the number of each token's document, and Hugging Face models that find documents in positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import families

VOCABULARY, LENGTH = 97, 12
FOUND_IN_POSITIONS = ("llama", "qwen3", "gpt2", "gemma2")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    """Positions begin again in each document; labels are the next tokens."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(position_ids)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        mask = (causal & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]
        return self.loss(x, mask, targets)

    def loss(self, x: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x), mask)
            x = x + mlp(self.norms[2 * i + 1](x))
        return F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1), targets.flatten(), ignore_index=-100)


class OfEnds(Gpt):
    """It takes 0, and where each document of the sequence ends."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        numbers = (places[None, :, None] >= cu_seqlens[:, None, 1:]).sum(-1)
        return super().forward(tokens, targets, position_ids, numbers)


class OfMask(Gpt):
    """It takes the mask itself."""

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor, document_mask: Tensor) -> Tensor:
        return self.loss(self.tokens(tokens) + self.positions(position_ids), document_mask, targets)


class OfWindows(nn.Module):
    """ModernBERT with the masks of its layers made from documents: in every third layer all tokens of a document, in
    the others those in the window around a token.
    """

    def __init__(self) -> None:
        super().__init__()
        entry = families.hugging_face("ModernBert:ForMaskedLM", VOCABULARY, **families.BERT, local_attention=4)
        self.inner = entry.model

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        whole = (document_ids[:, :, None] == document_ids[:, None, :])[:, None]
        near = (places[:, None] - places[None, :]).abs() <= self.inner.config.sliding_window
        masks = {"full_attention": whole, "sliding_attention": whole & near}
        return self.inner(input_ids, attention_mask=masks, position_ids=position_ids, labels=labels).loss


OWN = {"own": Gpt, "own, of ends": OfEnds, "own, of a mask": OfMask}  # in float64


def build(name: str) -> nn.Module:
    """One of ``FOUND_IN_POSITIONS``, or of ``OWN``, or modernbert."""
    if name in OWN:
        torch.manual_seed(5)
        return OWN[name]().double()
    if name == "modernbert":
        torch.manual_seed(5)
        return OfWindows().double().eval()
    model = families.build(name).model
    model.config.use_cache = False
    return model
