"""Models that are drawn: decoders, encoders, encoder-decoders and vision models of every usual make."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.fuzz.specs import Choices
from tests.fuzz.drawn.parts import MLP, Attention, Experts, norm

FIELDS: dict[str, tuple[Any, ...]] = {
    "kind": ("decoder", "encoder", "encoder_decoder", "vision"),
    "layers": (2, 1, 3, 4),
    "heads": (4, 2, 3, 6),
    "head_width": (4, 8, 6),
    "key_heads": ("all", "half", "one"),
    "width": (16, 24, 12, 18),
    "inner": (32, 24, 36, 40),
    "vocabulary": (32, 33, 50),
    "length": (8, 6, 9, 12),
    "norm": ("layer", "rms"),
    "norm_place": ("pre", "post", "parallel", "none"),
    "qkv": ("split", "fused"),
    "positions": ("learned", "rotary", "relative", "alibi", "none"),
    "attention": ("sdpa", "spelled"),
    "mlp": ("plain", "gated", "gated_fused"),
    "activation": ("gelu", "relu", "silu", "tanh"),
    "experts": ("none", "rows", "dense", "stacked"),
    "routing": ("scores", "steady"),
    "capacity": (None, 3),
    "skips_empty": (False, True),
    "inner_norm": (False, True),
    "bias": (True, False),
    "tied": (False, True),
    "shared_layer": (False, True),
    "frozen": ("none", "embedding", "first_block", "biases"),
    "unused": (False, True),
    "convolution": (False, True),
    "dropout": (0.0, 0.1),
    "padding": (False, True),
    "documents": (False, True),
    "loss": ("mean", "ignored", "weighted", "masked", "smoothed", "counted", "auxiliary", "squares"),
    "returns": ("loss", "named"),
    "penalty": ("none", "balance", "spread"),
    "early_losses": ("none", "first", "each", "own_heads", "further"),
}


class Block(nn.Module):
    """[b, s, h] -> [b, s, h]; with ``memory`` also attention over it. ``seen`` [b, 1, s, s]: keys that are read."""

    def __init__(self, given: dict[str, Any], *, causal: bool, crosses: bool = False) -> None:
        super().__init__()
        self.place, width = given["norm_place"], given["width"]
        self.attention = Attention(given, causal=causal)
        self.cross = Attention({**given, "positions": "none"}, causal=False) if crosses else None
        self.mlp = MLP(given) if given["experts"] == "none" else Experts(given)
        self.first, self.second = norm(given["norm"], width), norm(given["norm"], width)
        self.third = norm(given["norm"], width) if crosses else None
        self.convolution = nn.Conv1d(width, width, 3, padding=2, groups=width) if given["convolution"] else None
        self.dropout = nn.Dropout(given["dropout"])

    def forward(self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        if self.convolution is not None:
            x = x + self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        if self.place == "parallel":
            y = self.first(x)
            return x + self.attention(y, y, seen) + self.dropout(self.mlp(y))
        x = self._added(x, self.first, lambda y: self.attention(y, y, seen))
        if self.cross is not None and self.third is not None and memory is not None:
            cross = self.cross
            x = self._added(x, self.third, lambda y: cross(y, memory))
        return self._added(x, self.second, self.mlp)

    def _added(self, x: Tensor, norm: nn.Module, part: Any) -> Tensor:
        if self.place == "post":
            return norm(x + self.dropout(part(x)))
        if self.place == "none":
            return x + self.dropout(part(x)) * 0.25  # or a gated MLP squares x again and again: rounding is amplified
        return x + self.dropout(part(norm(x)))


class Drawn(nn.Module):
    """The whole model; its forward takes the inputs of ``inputs_of`` and returns the loss."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given, width = given, given["width"]
        self.tokens = nn.Embedding(given["vocabulary"], width)
        if given["kind"] == "vision":
            self.stem = nn.Conv2d(3, width, 2, stride=2)
        if given["positions"] == "learned":
            self.positions = nn.Embedding(64, width)
        causal = given["kind"] in ("decoder", "encoder_decoder")
        crosses = given["kind"] == "encoder_decoder"
        if crosses:
            self.encoder = nn.ModuleList(Block(given, causal=False) for _ in range(given["layers"]))
        self.blocks = nn.ModuleList(Block(given, causal=causal, crosses=crosses) for _ in range(given["layers"]))
        self.norm = norm(given["norm"], width)
        self.head = nn.Linear(width, given["vocabulary"], bias=False)
        if given["early_losses"] == "own_heads":
            self.heads = nn.ModuleList(nn.Linear(width, given["vocabulary"], bias=False) for _ in self.blocks)
        if given["tied"]:
            self.head.weight = self.tokens.weight
        if given["unused"]:
            self.unused = nn.Linear(width, width)
        self._freeze()

    def _freeze(self) -> None:
        kind = self.given["frozen"]
        for name, parameter in self.named_parameters():
            is_first = name.startswith("blocks.0.") and kind == "first_block"
            if is_first or (kind == "embedding" and name.startswith("tokens")) or (kind == "biases" and "bias" in name):
                parameter.requires_grad_(False)

    def forward(
        self,
        labels: Tensor,
        ids: Tensor | None = None,
        pixels: Tensor | None = None,
        weights: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        x = self._embedded(ids) if pixels is None else self._patches(pixels)
        memory, seen = None, self._seen(ids, document_ids)
        if self.given["kind"] == "encoder_decoder":
            memory, x = x, self._embedded(labels.clamp(min=0))
            for block in self.encoder:
                memory = block(memory, None, seen)
            seen = None
        early = list[Tensor]()
        for number, block in enumerate(self.blocks):
            for _ in range(2 if self.given["shared_layer"] else 1):
                x = block(x, memory, seen)
            early += self._early(number, x, labels, weights)
        logits = self.head(self.norm(x))
        loss = loss_of(self.given, logits, labels, weights) + penalty_of(self.given["penalty"], logits)
        for one in early:
            loss = loss + one
        return {"logits": logits, "objective": loss} if self.given["returns"] == "named" else loss

    def _early(self, number: int, x: Tensor, labels: Tensor, weights: Tensor | None) -> list[Tensor]:
        """The loss behind a block, if there is one; with ``further`` each block predicts tokens one place further."""
        kind = self.given["early_losses"]
        if kind == "none" or (kind == "first" and number):
            return []
        if kind == "further":
            unread = 0 if self.given["loss"] == "squares" else -100
            labels = F.pad(labels[:, number + 1 :], (0, number + 1), value=unread)
        head = self.heads[number] if kind == "own_heads" else self.head
        return [0.5 * loss_of(self.given, head(x), labels, weights)]

    def _seen(self, ids: Tensor | None, documents: Tensor | None) -> Tensor | None:
        """[b, 1, s, s]: not padding, but for a token itself; within its document."""
        found = None if documents is None else (documents[:, :, None] == documents[:, None, :])[:, None]
        if ids is None or not self.given["padding"]:
            return found
        seen = ~(ids == 0)[:, None, None] | torch.eye(ids.shape[1], dtype=torch.bool)
        return seen if found is None else seen & found

    def _patches(self, pixels: Tensor) -> Tensor:
        return self.stem(pixels.to(self.stem.weight.dtype)).flatten(2).transpose(1, 2)

    def _embedded(self, ids: Tensor | None) -> Tensor:
        assert ids is not None
        x = self.tokens(ids)
        if self.given["positions"] == "learned":
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return x


def loss_of(given: dict[str, Any], logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """A scalar of [b, s, v] and [b, s]."""
    rows, flat = logits.flatten(0, 1), labels.flatten()
    match given["loss"]:
        case "smoothed":
            return F.cross_entropy(rows, flat, label_smoothing=0.1)
        case "weighted" if weights is not None:
            each = F.cross_entropy(rows, flat, reduction="none")
            squares = weights.flatten().to(each.dtype).pow(2)  # above zero
            return (each * squares).sum() / squares.sum()
        case "masked" if weights is not None:
            kept = (weights.flatten() > 0).to(rows.dtype)
            return (F.cross_entropy(rows, flat, reduction="none") * kept).sum() / kept.sum().clamp(min=1.0)
        case "counted":
            kept = flat != -100
            return F.cross_entropy(rows, flat, reduction="sum", ignore_index=-100) / kept.sum()
        case "auxiliary":
            return F.cross_entropy(rows, flat) + 1e-3 * rows.logsumexp(-1).pow(2).mean()
        case "squares":
            return (rows - F.one_hot(flat, rows.shape[-1]).to(rows.dtype)).pow(2).mean()
    return F.cross_entropy(rows, flat)


def penalty_of(kind: str, logits: Tensor) -> Tensor | float:
    """No sum over tokens: products and roots of means over all of them."""
    rows = logits.flatten(0, 1)
    match kind:
        case "balance":
            return 0.1 * rows.shape[-1] * rows.softmax(-1).mean(0).square().sum()
        case "spread":
            return 0.01 * (rows.square().mean() - rows.mean().square() + 1e-3).sqrt()
    return 0.0


def build(given: Choices) -> Drawn:
    """Equal weights at every call; none of them zero or one by initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Drawn(given)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def inputs_of(given: Choices) -> dict[str, dict[str, Any]]:
    """The spec's section ``inputs``."""
    length = given["length"]
    ids = {"shape": [length], "dtype": "int64", "high": given["vocabulary"]}
    found: dict[str, dict[str, Any]] = {"labels": ids}
    if given["kind"] == "vision":
        found["pixels"] = {"shape": [3, 2, 2 * length], "dtype": "float32"}
    else:
        found["ids"] = ids
    if has_documents(given):
        found["document_ids"] = {"shape": [length], "dtype": "int64"}
    if given["loss"] in ("weighted", "masked"):
        found["weights"] = {"shape": [length], "dtype": "float32"}
    return found


def has_documents(given: Choices) -> bool:
    return given["documents"] and given["kind"] != "vision"


def spec_part(given: Choices) -> dict[str, Any]:
    """The model's part of a spec."""
    named = {"loss": {"output": "objective"}} if given["returns"] == "named" else {}
    is_apart = given["kind"] != "encoder_decoder" and not given["convolution"] and given["capacity"] is None
    packed = {"data": {"packing": "documents"}} if is_apart and has_documents(given) else {}
    return {"inputs": inputs_of(given), **named, **packed}
