"""Rewritten encoders and encoder-decoders: T5, DeBERTa, Conformer, wav2vec, Perceiver, ELECTRA-like heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 96, 64, 4


class T5Attention(nn.Module):
    """No scaling; the first layer's bucketed relative bias serves all layers."""

    def __init__(self, has_bias: bool, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative = nn.Embedding(8, HEADS) if has_bias else None
        self.causal = causal

    def bias(self, length: int) -> Tensor:
        place = torch.arange(length)
        distance = (place[None, :] - place[:, None]).abs().clamp(max=7)
        values = self.relative(distance).permute(2, 0, 1).unsqueeze(0)
        return values + torch.full((length, length), -1e9).triu(1) if self.causal else values

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            f(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        if bias is not None:
            scores += bias
        return self.o(torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5Layer(nn.Module):
    def __init__(self, first: bool, causal: bool) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm3 = T5Attention(first, causal), RMSNorm(), RMSNorm()
        self.cross, self.norm2 = (T5Attention(False, False), RMSNorm()) if causal else (None, None)
        self.wi_0, self.wi_1 = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.wo = nn.Linear(128, WIDTH, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, bias)
        if self.cross is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        h = self.norm3(x)
        return x + self.wo(F.gelu(self.wi_0(h), approximate="tanh") * self.wi_1(h))


class T5(nn.Module):
    """Targets are shifted right; the head is the shared embedding, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([T5Layer(i == 0, False) for i in range(2)])
        self.decoder = nn.ModuleList([T5Layer(i == 0, True) for i in range(2)])
        self.norm_e, self.norm_d = RMSNorm(), RMSNorm()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, bias = self.shared(input_ids), self.encoder[0].attention.bias(input_ids.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        memory = self.norm_e(x)
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        x, bias = self.shared(shifted), self.decoder[0].attention.bias(labels.shape[1])
        for layer in self.decoder:
            x = layer(x, bias, memory)
        logits = (self.norm_d(x) * WIDTH**-0.5) @ self.shared.weight.t()
        return {"loss": F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)), "logits": logits}


def t5() -> nn.Module:
    return T5()


class Disentangled(nn.Module):
    """DeBERTa: content to content, content to position, position to content; biases of q and v only, joined by cat."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.pos_key, self.pos_query = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], HEADS, -1).transpose(-2, -3)

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        q, k, v = (self.heads(t) for t in F.linear(x, self.in_proj.weight, bias).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2)
        to_place = q @ self.heads(self.pos_key(table)).transpose(-1, -2)
        from_place = k @ self.heads(self.pos_query(table)).transpose(-1, -2)
        index = places.expand(*scores.shape[:2], -1, -1)
        scores = scores + to_place.gather(-1, index) + from_place.gather(-1, index).transpose(-1, -2)
        y = (scores / math.sqrt(3 * q.shape[-1])).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class DebertaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Disentangled(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.intermediate, self.output = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, table, places))
        return self.norm2(x + self.output(F.gelu(self.intermediate(x))))


@dataclass
class MaskedOutput:
    """The model's result: an object, not a tuple."""

    loss: Tensor
    logits: Tensor


class Deberta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.relative = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.norm_relative = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([DebertaLayer() for _ in range(2)])
        self.head, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(VOCABULARY))

    def encode(self, input_ids: Tensor) -> Tensor:
        n = torch.arange(input_ids.shape[1])
        places = (n[:, None] - n[None, :]).clamp(-8, 7) + 8
        table, x = self.norm_relative(self.relative.weight), self.norm(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x, table, places)
        return F.linear(F.gelu(self.head(x)), self.embed.weight, self.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.encode(input_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


class DebertaObject(Deberta):
    def forward(self, input_ids: Tensor, labels: Tensor) -> MaskedOutput:  # type: ignore[override]
        return MaskedOutput(*super().forward(input_ids, labels))


def deberta() -> nn.Module:
    return Deberta()


def deberta_object() -> nn.Module:
    return DebertaObject()


class ConvolutionModule(nn.Module):
    """1×1 convolution, gate, depthwise convolution, batch norm, swish, 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pointwise1, self.pointwise2 = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.depthwise, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.pointwise1(self.norm(x).transpose(1, 2)), dim=1)
        return self.pointwise2(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        feed = lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH))  # noqa: E731
        self.feed1, self.feed2, self.convolution = feed(), feed(), ConvolutionModule()
        self.norm_a, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed1(x)
        h = self.norm_a(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.feed2(x))


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.blocks = nn.Linear(20, WIDTH), nn.ModuleList([ConformerBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x = self.up(features)
        for block in self.blocks:
            x = block(x)
        return F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), labels.flatten())


def conformer() -> nn.Module:
    return Conformer()


class Wav2Vec(nn.Module):
    """Strided convolutions over the wave, a grouped convolution for positions, encoder layers of torch, one label."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 32, 10, stride=5, bias=False),
            nn.GroupNorm(32, 32),
            nn.GELU(),
            nn.Conv1d(32, 32, 3, stride=2),
            nn.GELU(),
        )
        self.project = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, WIDTH))
        self.places = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 4, padding=2, groups=4), dim=2)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, wave: Tensor, labels: Tensor) -> Tensor:
        x = self.project(self.features(wave[:, None]).transpose(1, 2))
        x = x + F.gelu(self.places(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), labels)


def wav2vec() -> nn.Module:
    return Wav2Vec()


class PerceiverIO(nn.Module):
    """A latent array reads the input, thinks, and is read by queries of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.latents, self.query = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(16, WIDTH))
        attention = lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)  # noqa: E731
        self.read, self.write = attention(), attention()
        self.think = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, HEADS, 128, activation=F.gelu, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = latents + self.read(latents, x, x, need_weights=False)[0]
        for layer in self.think:
            latents = layer(latents)
        query = self.query.repeat(x.shape[0], 1, 1)
        out, _ = self.write(query, latents, latents)
        return F.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())


def perceiver_io() -> nn.Module:
    return PerceiverIO()
