"""Models whose sequence is in none of their inputs: patches of images and videos, frames of sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry
from tests.models.plain import Block

WIDTH, HEADS, CLASSES = 16, 2, 5
IMAGES = {"images": ((3, 8, 8), torch.float64, None), "labels": ((), torch.int64, CLASSES)}
CLIPS = {"images": ((3, 8, 8, 8), torch.float64, None), "labels": ((), torch.int64, CLASSES)}
NOISE = ((4, 8, 8), torch.float64, None)
TEXT = {name: ((8,), torch.int64, CLASSES) for name in ("input_ids", "labels")}


def blocks(count: int = 2, *, causal: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Block(WIDTH, HEADS, causal) for _ in range(count))


class Classifier(nn.Module):
    """``patches``: images to [b, n, d]; ``pool``: those to [b, d]."""

    def __init__(self, *modules: nn.Module, patches: Callable[..., Tensor], pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.ModuleList(modules), blocks(), nn.Linear(WIDTH, CLASSES)
        self.patches, self.pool = patches, pool

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images, *self.stem)
        for block in self.blocks:
            x = block(x, None)
        return F.cross_entropy(self.head(self.pool(x)), labels)


def of_convolution(images: Tensor, stem: nn.Module) -> Tensor:
    return stem(images).flatten(2).transpose(1, 2)


def of_pixels(images: Tensor, stem: nn.Module) -> Tensor:
    b, c, h, w = images.shape
    apart = images.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1)
    return stem(apart.reshape(b, h * w // 4, 4 * c))


def row_by_row(images: Tensor, stem: nn.Module, first: nn.Module) -> Tensor:
    """All patches of the batch go through a product behind each other."""
    x = stem(images).permute(0, 2, 3, 1)
    return first(x.reshape(-1, WIDTH)).view(len(images), -1, WIDTH)


def in_space_and_time(images: Tensor, stem: nn.Module, space: nn.Module, time: nn.Module) -> Tensor:
    """Attention within a frame, then of one place over time."""
    x = stem(images).flatten(3).permute(0, 2, 3, 1)
    b, frames, places, _ = x.shape
    x = space(x.reshape(b * frames, places, WIDTH), None).view(b, frames, places, WIDTH)
    x = time(x.transpose(1, 2).reshape(b * places, frames, WIDTH), None)
    return x.view(b, places * frames, WIDTH)


class Diffusion(nn.Module):
    """The noise of patches that a step and a class modulate, put together to an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Conv2d(4, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1)
        self.step, self.kind = nn.Linear(1, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.blocks, self.modulations = blocks(), nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.end = nn.Linear(WIDTH, 16)

    def forward(self, noisy: Tensor, step: Tensor, kind: Tensor, labels: Tensor) -> Tensor:
        x, given = of_convolution(noisy, self.stem) + self.places, F.silu(self.step(step) + self.kind(kind))
        for block, modulation in zip(self.blocks, self.modulations, strict=True):
            shift, scale = modulation(given).unsqueeze(1).chunk(2, -1)
            x = x + block(x * (1 + scale) + shift, None)
        apart = self.end(x).reshape(len(x), 4, 4, 2, 2, 4)
        return F.mse_loss(torch.einsum("bhwpqc->bchpwq", apart).reshape(noisy.shape), labels)


class Spoken(nn.Module):
    """An encoder of sound, two convolutions before it, and a decoder that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(6, WIDTH, 3, 1, 1), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1))
        self.places, self.tokens = nn.Parameter(torch.randn(8, WIDTH) * 0.1), nn.Embedding(CLASSES, WIDTH)
        self.encoder, self.decoder, self.q = blocks(1), blocks(1, causal=True), nn.Linear(WIDTH, WIDTH)
        self.kv, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, sound: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        heard = self.encoder[0](self.convolutions(sound).transpose(1, 2) + self.places, None)
        x = self.decoder[0](self.tokens(input_ids), None)
        x = x + F.scaled_dot_product_attention(self.q(x), *self.kv(heard).chunk(2, -1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Captioned(Diffusion):
    """Patches attend to a text of other length."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.q, self.kv = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, noisy: Tensor, text: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore
        x, given = of_convolution(noisy, self.stem) + self.places, self.text(text)
        for block in self.blocks:
            x = block(x + F.scaled_dot_product_attention(self.q(x), *self.kv(given).chunk(2, -1)), None)
        return F.mse_loss(self.end(x).sum((1, 2)), labels.mean((1, 2, 3)))


class Joint(nn.Module):
    """A text before patches: a stream with weights for each, which meet in one attention, then both in one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.stem, self.places = nn.Linear(6, WIDTH), nn.Conv2d(4, WIDTH, 2, 2), nn.Linear(1, WIDTH)
        self.qkv, self.out, self.up = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(2))
            for sizes in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
        )
        self.blocks, self.norm, self.end = blocks(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, text: Tensor, noisy: Tensor, labels: Tensor) -> Tensor:
        dtype = self.end.weight.dtype
        given, x = self.text(text.to(dtype)), of_convolution(noisy.to(dtype), self.stem)
        streams = zip(self.qkv, (given, x), strict=True)
        q, k, v = torch.cat([layer(self.norm(x)) for layer, x in streams], 1).chunk(3, -1)
        places = torch.arange(q.shape[1], device=q.device)[:, None].to(q.dtype).cos()
        attended = F.scaled_dot_product_attention(q * places, k * places, v)
        of_text, of_image = attended.split([given.shape[1], x.shape[1]], 1)
        given, x = given + self.up[0](self.out[0](of_text)).tanh(), x + self.up[1](self.out[1](of_image)).tanh()
        x = torch.cat([given, x], 1)
        for block in self.blocks:
            x = block(x + self.places(places), None)
        return F.mse_loss(self.end(x[:, given.shape[1] :]).sum((1, 2)), labels.mean((1, 2, 3)))


class Seen(nn.Module):
    """Patches before the tokens of a text, in one sequence; ``marks`` go with the patches, and are left out then."""

    def __init__(self, marks: int) -> None:
        super().__init__()
        self.marks = nn.Parameter(torch.randn(1, marks, WIDTH))
        self.stem, self.first, self.sight = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, WIDTH), blocks(1)
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks, self.head = blocks(causal=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        seen = self.first(of_convolution(images, self.stem))
        seen = self.sight[0](torch.cat([self.marks.expand(len(seen), -1, -1), seen], 1), None)[:, -16:]
        x = torch.cat([seen, self.tokens(input_ids)], 1)
        for block in self.blocks:
            x = block(x, None)
        return F.cross_entropy(self.head(x[:, seen.shape[1] :]).flatten(0, 1), labels.flatten())


def joint(length: int) -> Entry:
    return Entry(Joint().double(), {"text": ((length, 6), torch.float64, None), "noisy": NOISE, "labels": NOISE})


def _of_images(*modules: nn.Module, patches: Callable[..., Tensor] = of_convolution, last: bool = False) -> Entry:
    pool: Callable[[Tensor], Tensor] = (lambda x: x[:, -1]) if last else (lambda x: x.mean(1))
    return Entry(Classifier(*modules, patches=patches, pool=pool).double(), dict(IMAGES))


def _of_clips() -> Entry:
    modules = nn.Conv3d(3, WIDTH, (1, 2, 2), (1, 2, 2)), Block(WIDTH, HEADS, False), Block(WIDTH, HEADS, False)
    model = Classifier(*modules, patches=in_space_and_time, pool=lambda x: x.mean(1))
    return Entry(model.double(), dict(CLIPS))


def _diffusion() -> Entry:
    inputs: dict[str, Any] = {"noisy": NOISE, "step": ((1,), torch.float64, None), "kind": ((), torch.int64, CLASSES)}
    return Entry(Diffusion().double(), inputs | {"labels": NOISE})


MODELS: dict[str, Callable[[], Entry]] = {
    "patches of a convolution": lambda: _of_images(nn.Conv2d(3, WIDTH, 2, 2)),
    "patches of pixels": lambda: _of_images(
        nn.Sequential(nn.LayerNorm(12), nn.Linear(12, WIDTH)), patches=of_pixels, last=True
    ),
    "patches behind each other": lambda: _of_images(
        nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, WIDTH), patches=row_by_row
    ),
    "space and time": _of_clips,
    "diffusion": _diffusion,
    "an image and 7 tokens": lambda: Entry(
        Captioned().double(), {"noisy": NOISE, "text": ((7, 6), torch.float64, None), "labels": NOISE}
    ),
    "sound": lambda: Entry(Spoken().double(), {"sound": ((6, 16), torch.float64, None)} | TEXT),
    "images of 20 tokens before text": lambda: Entry(Seen(4).double(), {"images": IMAGES["images"]} | TEXT),
    "5 tokens and an image": lambda: joint(5),
    "7 tokens and an image": lambda: joint(7),
    "images of 17 tokens before text": lambda: Entry(Seen(1).double(), {"images": IMAGES["images"]} | TEXT),
}
