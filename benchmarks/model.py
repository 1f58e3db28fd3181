"""The model and the data of every run: a GPT of 4 layers, 256 wide, 8 heads, 8192 tokens, sequences of 128, batch 8.

It is written for one device. ``forward(tokens)`` gives logits [b, s, v]; ``forward(tokens, targets)`` gives the loss.
Weights and batches come from fixed seeds, so the losses of all runs can be compared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4, 256, 8, 8192, 128, 8
LEARNING_RATE = 1e-3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.by_head(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def by_head(x: Tensor) -> Tensor:
        """[b, s, heads·64] to [b, heads, s, size]; the number of heads follows the width, so that a shard works too."""
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if targets is None else cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> Model:
    """The model with the same weights in every process."""
    torch.manual_seed(0)
    model = Model()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [8, 128]: the global batch of a step; four batches take turns."""
    generator = torch.Generator().manual_seed(1000 + step % 4)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
