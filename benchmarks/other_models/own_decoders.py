"""Rewritten decoders, each with the idiom that the code beside its paper is known for."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 96, 64, 4, 2, 32


class CausalAttention(nn.Module):
    """One matrix for q, k and v; a triangle as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        q, k, v = (part.view(b, s, HEADS, c // HEADS).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        return self.c_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, s, c))


class LambdaBlock(nn.Module):
    """The MLP's layers are in a ModuleDict, and a lambda over that dict calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CausalAttention()
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH), "act": nn.GELU()}
        )
        m = self.mlp
        self.mlpf = lambda x: m.down(m.act(m.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    """Learned positions, blocks of a class, weights of the head tied to the embedding by assignment."""

    def __init__(self, block: type[nn.Module], tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([block() for _ in range(LAYERS)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(0, input_ids.size(1), dtype=torch.long, device=input_ids.device).unsqueeze(0)
        x = self.transformer.wte(input_ids) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


class FlashBlock(nn.Module):
    """Attention by scaled_dot_product_attention, no biases in the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def gpt_lambda() -> nn.Module:
    return GPT(LambdaBlock, tied=False)


def gpt_tied() -> nn.Module:
    return GPT(FlashBlock)


class RotaryLlama(nn.Module):
    """Complex rotations in a plain attribute that is moved in the forward; grouped kv heads; RMS norms; SwiGLU."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = WIDTH // HEADS
            self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.wk, self.wv = nn.Linear(WIDTH, 2 * d, bias=False), nn.Linear(WIDTH, 2 * d, bias=False)
            self.w1, self.w3 = nn.Linear(WIDTH, 160, bias=False), nn.Linear(WIDTH, 160, bias=False)
            self.w2 = nn.Linear(160, WIDTH, bias=False)
            self.attention_norm, self.ffn_norm = RotaryLlama.Norm(), RotaryLlama.Norm()

        def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
            b, s, _ = x.shape
            h = self.attention_norm(x)
            q, k, v = self.wq(h).view(b, s, HEADS, -1), self.wk(h).view(b, s, 2, -1), self.wv(h).view(b, s, 2, -1)
            q, k = self.rotate(q, freqs_cis), self.rotate(k, freqs_cis)
            k, v = (t[:, :, :, None].expand(b, s, 2, HEADS // 2, t.shape[-1]).reshape(b, s, HEADS, -1) for t in (k, v))
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + mask
            out = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous().view(b, s, -1)
            x = x + self.wo(out)
            h = self.ffn_norm(x)
            return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

        @staticmethod
        def rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).type_as(x)

    def __init__(self) -> None:
        super().__init__()
        d = WIDTH // HEADS
        self.tok_embeddings, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers, self.norm = nn.ModuleList([RotaryLlama.Block() for _ in range(LAYERS)]), RotaryLlama.Norm()
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, d, 2)[: d // 2].double() / d))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        _, s = input_ids.shape
        h = self.tok_embeddings(input_ids)
        self.freqs_cis = self.freqs_cis.to(h.device)
        mask = torch.full((s, s), float("-inf"), device=input_ids.device)
        mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:s], mask)
        logits = self.output(self.norm(h))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama() -> nn.Module:
    return RotaryLlama()


class AlibiBlock(nn.Module):
    """Slopes in a plain attribute; a head by partial over the embedding's weight below."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.slopes = torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        distance = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        bias = self.slopes.to(x)[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, torch.finfo(x.dtype).min)
        scores = torch.baddbmm(
            bias.repeat(b, 1, 1),
            q.reshape(b * HEADS, s, -1),
            k.reshape(b * HEADS, s, -1).mT,
            alpha=(WIDTH // HEADS) ** -0.5,
        )
        y = (scores.softmax(-1) @ v.reshape(b * HEADS, s, -1)).view(b, HEADS, s, -1).transpose(1, 2).reshape(b, s, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.norm_emb, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*[AlibiBlock() for _ in range(LAYERS)])
        self.head = partial(F.linear, weight=self.emb.weight)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.blocks(self.norm_emb(self.emb(input_ids)))))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def alibi() -> nn.Module:
    return Alibi()


class NeoXBlock(nn.Module):
    """Attention and MLP beside each other on one residual; a quarter of each head rotates; q, k, v by head."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 4, 2) / 4), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        turning, rest = x[..., :4], x[..., 4:]
        angle = torch.outer(torch.arange(x.shape[-2], device=x.device), self.inv_freq)
        cos, sin = (f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin))
        half = torch.cat((-turning[..., 2:], turning[..., :2]), -1)
        return torch.cat((turning * cos + half * sin, rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(b, s, HEADS, 3 * WIDTH // HEADS).permute(0, 2, 1, 3)
        q, k, v = qkv.split(WIDTH // HEADS, -1)
        scores = torch.einsum("bhqd,bhkd->bhqk", self.rotate(q), self.rotate(k)) / math.sqrt(q.shape[-1])
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        scores.masked_fill_(causal, -1e9)
        attended = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).reshape(b, s, -1)
        mlp = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))
        return x + self.dense(attended) + mlp


def gpt_neox() -> nn.Module:
    return GPT(NeoXBlock, tied=False)


class Universal(nn.Module):
    """One block, applied again and again with a step's embedding: every stage holds the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.block, self.steps = FlashBlock(), nn.Parameter(torch.randn(LAYERS, WIDTH) * 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(input_ids)
        for step in range(LAYERS):
            x = self.block(x + self.steps[step])
        return F.cross_entropy(self.head(x).permute(0, 2, 1), labels, label_smoothing=0.1)


def universal() -> nn.Module:
    return Universal()
