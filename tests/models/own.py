"""Models of our own with unusual code: what a person may bring that no library ships."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.families import LENGTH, Entry, tokens
from tests.models.own_losses import LOSSES, masked_loss, mean_loss

WIDTH, HEADS, SIZE, VOCABULARY = 32, 4, 8, 97


class RMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class EinsumAttention(nn.Module):
    """Heads as a fifth dimension of one product; the projection back is an einsum over two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, WIDTH, SIZE) * 0.2)
        self.out = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsw,thwd->tbhsd", x, self.qkv)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / SIZE**0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bhkd,hdw->bqw", weights, v, self.out)


class MatmulAttention(nn.Module):
    """Attention by hand; a learned table of biases by distance and head; keys and queries normed for each head.

    ``normed``: one norm for all heads (True), one for each ("apart"), or one of all queries together ("together").
    """

    def __init__(self, biased: bool = False, normed: bool | str = False, cross: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i == 3) for i in range(4))
        self.bias = nn.Embedding(2 * LENGTH, HEADS) if biased else None
        self.norms = nn.ModuleList([RMSNorm(SIZE), RMSNorm(SIZE)]) if normed is True else None
        self.norms_apart = nn.ModuleList(RMSNorm(SIZE) for _ in range(HEADS)) if normed == "apart" else None
        self.norm_together = nn.LayerNorm(WIDTH) if normed == "together" else nn.Identity()
        self.cross = cross
        self.register_buffer("causal", torch.ones(1, 1, LENGTH, LENGTH).tril(), persistent=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        source = x if memory is None else memory
        products = self.norm_together(self.q(x)), self.k(source), self.v(source)
        q, k, v = (product.view(batch, length, HEADS, SIZE).transpose(1, 2) for product in products)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.norms_apart is not None:
            q = torch.cat([norm(head) for norm, head in zip(self.norms_apart, q.split(1, 1), strict=True)], 1)
        scores = q @ k.transpose(-2, -1) * SIZE**-0.5
        if self.bias is not None:
            place = torch.arange(length, device=x.device)
            scores = scores + self.bias(place[:, None] - place[None, :] + LENGTH).permute(2, 0, 1).unsqueeze(0)
        if not self.cross:
            scores = scores.masked_fill(self.causal[:, :, :length, :length] == 0, -1e9)
        return self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class StateSpace(nn.Module):
    """A selective scan by heads; its reading and writing vectors are shared by all heads, and a convolution runs over
    the heads' values and over both of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [WIDTH, WIDTH + 2 * SIZE, HEADS]
        self.into, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)
        mixed = WIDTH + 2 * SIZE
        self.conv = nn.Conv1d(mixed, mixed, 3, padding=2, groups=mixed)
        self.decay = nn.Parameter(torch.zeros(HEADS))
        self.register_buffer("scales", torch.linspace(0.5, 1.5, sum(self.sizes)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        gate, mixed, rate = (self.into(x) * self.scales).split(self.sizes, -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :length]).transpose(1, 2)
        values, write, read = mixed.split([WIDTH, SIZE, SIZE], -1)
        step = F.softplus(rate)
        past = (-torch.exp(self.decay) * step).cumsum(1)  # [batch, length, heads]
        kept = (past[:, :, None] - past[:, None]).exp() * x.new_ones(length, length).tril()[..., None]
        seen = torch.einsum("btn,bsn,btsh,bsh->bhts", read, write, kept, step)
        y = torch.einsum("bhts,bshd->bthd", seen, values.view(batch, length, HEADS, SIZE))
        return self.out(y.flatten(2) * F.silu(gate))


class MLP(nn.Module):
    def __init__(self, gated: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.up = nn.Linear(WIDTH, 2 * 48 if gated else 64)
        self.down = nn.Linear(48 if gated else 64, WIDTH)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.dropout(F.gelu(self.up(x), approximate="tanh")))
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """Pre-norm by default; ``parallel``: attention and MLP read the same norm and are added at once."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = MatmulAttention,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        gated: bool = False,
        parallel: bool = False,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"norm": norm(WIDTH), "attention": attention(), "mlp": MLP(gated, inner_dropout)})
        if not parallel:
            self.parts["norm2"] = norm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts["norm"](x)
        if "norm2" not in self.parts:
            return x + self.parts["attention"](y) + self.parts["mlp"](y)
        x = x + self.dropout(self.parts["attention"](y))
        return x + self.dropout(self.parts["mlp"](self.parts["norm2"](x)))


class Model(nn.Module):
    """Tokens, positions, whatever ``run`` makes of the layers, head and loss."""

    def __init__(
        self,
        layers: nn.Module,
        run: Callable[[Any, Tensor], Tensor] | None = None,
        loss: Callable[..., Tensor] = mean_loss,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH) * 0.1)
        self.layers, self.norm = layers, nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.run, self.loss = run or in_order, loss

    def forward(self, input_ids: Tensor, labels: Tensor, **masks: Tensor) -> dict[str, Tensor]:
        x = self.run(self.layers, self.tokens(input_ids) + self.positions)
        logits = self.head(self.norm(x))
        return {"logits": logits, "loss": self.loss(logits, labels, **masks)}


def in_order(layers: Any, x: Tensor) -> Tensor:
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        x = layer(x)
    return x


def twice(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(layer(x))
    return x


def with_skips(layers: Any, x: Tensor) -> Tensor:
    """The first half's outputs join the second half, last first."""
    kept, half = [], len(layers) // 2
    for i, layer in enumerate(layers):
        x = layer(x if i < half else x + 0.5 * kept.pop())
        if i < half:
            kept.append(x)
    return x


def with_stops(layers: Any, x: Tensor) -> Tensor:
    """Each layer is first run without gradients, as recurrent reasoners do, and what it gives is scaled without any."""
    for layer in layers:
        with torch.no_grad():
            ahead = layer(x)
        with torch.no_grad():
            size = 1.0 + (x + ahead).abs().mean(-1, keepdim=True)
        x = layer((x + ahead) / size) + 0.1 * x.detach()
    return x


def with_checkpoints(layers: Any, x: Tensor) -> Tensor:
    """Recomputation in both kinds, which a plan has in line."""
    for i, layer in enumerate(layers):
        x = checkpoint(layer, x, use_reentrant=i % 2 == 0)
    return x


def with_memory(layers: Any, x: Tensor) -> Tensor:
    """The first layers encode; each of the others attends to what they made."""
    memory = layers[1](layers[0](x))
    for layer in layers[2:]:
        x = x + layer(x, memory)
    return x


class Frozen(Model):
    """Positions and one layer's norm are frozen; a linear is there and never used."""

    def __init__(self) -> None:
        super().__init__(stack(4, Block))
        self.positions.requires_grad_(False)
        self.layers[1].parts["norm"].weight.requires_grad_(False)
        self.layers[2].parts["mlp"].up.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 5)


class Decayed(Model):
    """A penalty on a weight is part of the loss: it counts once, not once for each microbatch."""

    def forward(self, input_ids: Tensor, labels: Tensor, **masks: Tensor) -> dict[str, Tensor]:
        result = super().forward(input_ids, labels, **masks)
        penalty = self.head.weight.pow(2).sum() + self.positions.pow(2).mean()
        return {"loss": result["loss"] + 0.01 * penalty}


class ClassWeights(Model):
    """Class weights as nn.CrossEntropyLoss holds them: a buffer."""

    def __init__(self) -> None:
        super().__init__(stack(4, Block), in_order)
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor, **masks: Tensor) -> Tensor:
        x = self.run(self.layers, self.tokens(input_ids) + self.positions)
        logits = self.head(self.norm(x))
        return self.criterion(logits.flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """PyTorch's own encoder layers, causal by a float mask, positions as a fixed table of sines."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.encoder = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        angles = torch.arange(LENGTH).unsqueeze(1) / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("sines", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]).to(self.sines)
        x = self.encoder(self.tokens(input_ids) * WIDTH**0.5 + self.sines, mask=mask, is_causal=True)
        return mean_loss(self.head(x), labels)


def stack(count: int, *kinds: Callable[[], nn.Module]) -> nn.ModuleList:
    """``count`` layers, the kinds in turn."""
    return nn.ModuleList(kinds[i % len(kinds)]() for i in range(count))


def own(layers: Callable[[], nn.Module], **options: Any) -> Entry:
    extra = {"mask": ((LENGTH,), torch.int64, 2)} if options.get("loss") is masked_loss else {}
    return Entry(Model(layers(), **options), tokens(VOCABULARY) | extra, () if extra else ("labels",))


def with_loss(loss: Callable[..., Tensor]) -> Callable[[], Entry]:
    return lambda: own(lambda: stack(4, Block), loss=loss)


def gpt(**options: float) -> Entry:
    from examples.gpt import GPT

    # More positions than a sequence has: a cut of the table must not fall together with a cut of the sequence.
    sizes = {"vocabulary": VOCABULARY, "length": LENGTH + 4, "width": WIDTH, "num_layers": 4, "num_heads": HEADS}
    return Entry(GPT(**(sizes | options)), tokens(VOCABULARY, labels="targets"), ("targets",))


def experts(num_layers: int = 2) -> Entry:
    """A loop over experts that selects the rows of each: shapes of the user's program depend on data."""
    from examples.moe import MoE

    sizes = {"width": WIDTH, "num_layers": num_layers, "num_heads": HEADS, "hidden": 24, "num_experts": 4}
    return Entry(MoE(VOCABULARY, LENGTH, **sizes), tokens(VOCABULARY, labels="targets"), ("targets",))


def slots() -> Entry:
    """Experts with a fixed number of slots for each sequence; what finds none is dropped."""
    from tests.models.experts import VOCABULARY as HIGH
    from tests.models.experts import Blocks
    from tests.models.slots import Slots, by_sequence

    return Entry(Blocks(lambda: Slots(by_sequence)), tokens(HIGH), ("labels",))


RELATIVE, NORMED = partial(MatmulAttention, biased=True), partial(MatmulAttention, normed=True)


def bert(normalize_first: bool) -> Entry:
    """The BERT of the examples; random zeros in its attention mask, where a sequence may be masked wholly."""
    from examples.bert import BERT

    sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "width": WIDTH, "num_heads": HEADS}
    inputs = tokens(VOCABULARY, "token_type_ids", "attention_mask") | {"sentence_order_label": ((), torch.int64, 2)}
    return Entry(BERT(normalize_first=normalize_first, **sizes), inputs, ("labels",))


MODELS: dict[str, Callable[[], Entry]] = {
    "gpt": gpt,
    "bert-post": lambda: bert(normalize_first=False),
    "bert-pre": lambda: bert(normalize_first=True),
    "experts": experts,
    "experts-4-layers": lambda: experts(4),
    "slots": slots,
    "gpt-5-layers": lambda: gpt(num_layers=5, vocabulary=257),
    "gpt-dropout": lambda: gpt(dropout=0.2),
    "dropout-outside": lambda: own(lambda: stack(4, partial(Block, dropout=0.2))),
    "dropout-inside": lambda: own(lambda: stack(2, partial(Block, dropout=0.2, inner_dropout=0.5))),
    "einsum": lambda: own(lambda: stack(4, partial(Block, EinsumAttention, RMSNorm, gated=True))),
    "matmul": lambda: own(lambda: stack(4, Block), tied=True),
    "module-dict": lambda: own(lambda: nn.ModuleDict({f"layer_{i}": Block() for i in range(4)})),
    "twice": lambda: own(lambda: stack(2, Block), run=twice),
    "alternating": lambda: own(lambda: stack(4, Block, partial(Block, EinsumAttention, RMSNorm, gated=True))),
    "parallel": lambda: own(lambda: stack(4, partial(Block, parallel=True))),
    "relative-bias": lambda: own(lambda: stack(4, partial(Block, RELATIVE))),
    "normed-keys": lambda: own(lambda: stack(4, partial(Block, NORMED, RMSNorm, gated=True))),
    "norm-a-head": lambda: own(lambda: stack(4, partial(Block, partial(MatmulAttention, normed="apart"), RMSNorm))),
    "norm-of-heads": lambda: own(lambda: stack(4, partial(Block, partial(MatmulAttention, normed="together")))),
    "state-space": lambda: own(lambda: stack(4, partial(Block, StateSpace, RMSNorm, gated=True))),
    "skips": lambda: own(lambda: stack(4, Block), run=with_skips),
    "stopped-gradients": lambda: own(lambda: stack(4, Block), run=with_stops),
    "checkpoints": lambda: own(lambda: stack(4, Block), run=with_checkpoints),
    "memory": lambda: own(
        lambda: nn.ModuleList([Block(), Block(), *(MatmulAttention(cross=True) for _ in range(3))]), run=with_memory
    ),
    "class-weights-buffer": lambda: Entry(ClassWeights(), tokens(VOCABULARY), ("labels",)),
    "penalty-loss": lambda: Entry(Decayed(stack(4, Block)), tokens(VOCABULARY), ("labels",)),
    **{name: with_loss(loss) for name, loss in LOSSES.items()},
    "frozen": lambda: Entry(Frozen(), tokens(VOCABULARY), ("labels",)),
    "torch-encoder": lambda: Entry(Encoder(), tokens(VOCABULARY), ("labels",)),
}
