"""Rewritten image models: DiT with adaLN-Zero, a MAE, shifted windows, an MLP-Mixer, a ViT with a hook."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 64, 4


def mlp(hidden: int = 4 * WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, WIDTH))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores if bias is None else scores + bias
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


class AdaBlock(nn.Module):
    """Six vectors from the condition: shift, scale and gate of attention and of the MLP; they begin near zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(), mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        nn.init.normal_(self.adaLN_modulation[-1].weight, std=0.02)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(self.norm1(x) * (1 + scale_a.unsqueeze(1)) + shift_a.unsqueeze(1))
        return x + gate_m.unsqueeze(1) * self.mlp(self.norm2(x) * (1 + scale_m.unsqueeze(1)) + shift_m.unsqueeze(1))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = (
            nn.Conv2d(4, WIDTH, 2, stride=2),
            nn.Parameter(torch.randn(1, 16, WIDTH), requires_grad=False),
        )
        self.time, self.label = (
            nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)),
            nn.Embedding(13, WIDTH),
        )
        self.blocks = nn.ModuleList([AdaBlock() for _ in range(2)])
        self.final_ada, self.final = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * 2 * 4)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, noisy: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        x = self.patch(noisy).flatten(2).transpose(1, 2) + self.place
        frequencies = torch.exp(-math.log(10000) * torch.arange(0, 16) / 16).to(x)
        angle = t[:, None].to(x) * frequencies[None]
        c = self.time(torch.cat([angle.cos(), angle.sin()], dim=-1)) + self.label(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_ada(F.silu(c)).chunk(2, dim=1)
        x = self.final(self.norm(x) * (1 + scale[:, None]) + shift[:, None])
        b, s = x.shape[0], int(x.shape[1] ** 0.5)
        out = torch.einsum("nhwpqc->nchpwq", x.reshape(b, s, s, 2, 2, 4)).reshape(b, 4, 2 * s, 2 * s)
        return (out - noise).pow(2).mean(dim=(1, 2, 3)).mean()


def dit() -> nn.Module:
    return DiT()


dit_over_cp = dit


class SwinBlock(nn.Module):
    """Windows of 4×4, shifted by roll in every second block, with a mask and a table of relative biases."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.attn, self.mlp = shift, Attention(), mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(49, HEADS) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + 3
        self.register_buffer("index", apart[0] * 7 + apart[1], persistent=False)
        region = torch.zeros(8, 8)
        for i, part in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            for j, other in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
                region[part, other] = 3 * i + j
        windows = self.windows(region[None, :, :, None]).squeeze(-1)
        self.register_buffer(
            "mask", (windows[:, None] != windows[:, :, None]) * -100.0 if shift else torch.zeros(4, 16, 16)
        )

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm1(x)
        bias = self.table[self.index.view(-1)].view(16, 16, HEADS).permute(2, 0, 1)
        y = self.attn(self.windows(y), bias + self.mask.repeat(b, 1, 1)[:, None])
        y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.head = nn.Conv2d(3, WIDTH, 2, stride=2), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.blocks = nn.Sequential(*[SwinBlock(2 * (i % 2)) for i in range(2)])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.patch(images).permute(0, 2, 3, 1))
        return F.cross_entropy(self.head(self.norm(x).mean((1, 2))), labels)


def swin() -> nn.Module:
    return Swin()


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.channels = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mlp()
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.head = nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.blocks = nn.Sequential(*[MixerBlock() for _ in range(2)])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        patches = F.unfold(images, 4, stride=4).mT
        return F.cross_entropy(self.head(self.norm(self.blocks(self.patch(patches))).mean(1)), labels)


def mixer() -> nn.Module:
    return Mixer()


class ViTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A class token; a forward hook scales each MLP's result by a parameter of its block: layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.head = nn.Conv2d(3, WIDTH, 4, stride=4), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.cls, self.place = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.ModuleList([ViTBlock() for _ in range(2)])
        for block in self.blocks:
            block.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))
            block.mlp.register_forward_hook(lambda module, args, out, block=block: out * block.gamma)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.place
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


def vit_hook() -> nn.Module:
    return ViT()


class MaskedAutoencoder(nn.Module):
    """Every second patch is hidden; the decoder sees a mask token there; the loss is over the hidden patches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(48, WIDTH), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.encoder, self.decoder = (nn.ModuleList([ViTBlock() for _ in range(n)]) for n in (3, 2))
        self.norm, self.token, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Parameter(torch.randn(WIDTH) * 0.02),
            nn.Linear(WIDTH, 48),
        )
        hidden = torch.arange(16) % 2 == 1
        self.register_buffer("keep", (~hidden).nonzero().squeeze(1))
        self.register_buffer("mask", hidden.float())

    def forward(self, images: Tensor) -> Tensor:
        b = images.shape[0]
        patches = images.reshape(b, 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, 16, 48)
        x = (self.patch(patches) + self.place)[:, self.keep]
        for block in self.encoder:
            x = block(x)
        y = self.token.expand(b, 16, -1).index_copy(1, self.keep, self.norm(x)) + self.place
        for block in self.decoder:
            y = block(y)
        loss = (self.out(y) - patches).square().mean(-1)
        return (loss * self.mask).sum() / (self.mask.sum() * b)


def mae() -> nn.Module:
    return MaskedAutoencoder()
