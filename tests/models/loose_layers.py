"""Layers that are no modules of their own: lists of parts used piece by piece, and plain code over lists of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.small import VOCABULARY, WIDTH, Body

HEADS = 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, s, h] each, in heads."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


def weights(*shapes: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)


def linears(num_layers: int, rows: int, columns: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(rows, columns) for _ in range(num_layers))


def norms(num_layers: int) -> nn.ModuleList:
    return nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_layers))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = linears(4, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def pieces(num_layers: int = 3) -> Body:
    """Each layer a dict of modules; the parent calls its pieces and adds the residuals."""

    def layer() -> nn.ModuleDict:
        q, k, v, o = linears(4, WIDTH, WIDTH)
        return nn.ModuleDict(
            {
                "n": nn.LayerNorm(WIDTH),
                "q": q,
                "k": k,
                "v": v,
                "o": o,
                "m": nn.LayerNorm(WIDTH),
                "u": nn.Linear(WIDTH, 4 * WIDTH),
                "d": nn.Linear(4 * WIDTH, WIDTH),
            }
        )

    def run(body: Body, x: Tensor) -> Tensor:
        for part in body.layers:
            h = part["n"](x)
            x = x + part["o"](attend(part["q"](h), part["k"](h), part["v"](h)))
            x = x + part["d"](part["u"](part["m"](x)).relu() ** 2)
        return x

    return Body(run, layers=nn.ModuleList(layer() for _ in range(num_layers)))


def einsums(num_layers: int = 2) -> Body:
    """No module at all below the model: einsums over two lists of weights."""

    def run(body: Body, x: Tensor) -> Tensor:
        for w, wo in zip(body.w, body.wo, strict=True):
            q, k, v = torch.einsum("btd,kdhe->kbhte", x, w).unbind(0)
            x = x + torch.einsum("bhte,hed->btd", F.scaled_dot_product_attention(q, k, v, is_causal=True), wo)
        return x

    size = WIDTH // HEADS
    return Body(
        run, w=weights(*[(3, WIDTH, HEADS, size)] * num_layers), wo=weights(*[(HEADS, size, WIDTH)] * num_layers)
    )


def two_lists(num_layers: int = 3) -> Body:
    """Attention and MLPs in a list each, used by turns; the parent adds the residuals."""

    def run(body: Body, x: Tensor) -> Tensor:
        for attention, mlp in zip(body.attentions, body.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return x

    return Body(
        run,
        attentions=nn.ModuleList(Attention() for _ in range(num_layers)),
        mlps=nn.ModuleList(Mlp() for _ in range(num_layers)),
    )


def two_lists_and_norms(num_layers: int = 3) -> Body:
    """As ``two_lists``, with a norm before each part that the parent calls."""

    def run(body: Body, x: Tensor) -> Tensor:
        for n, attention, m, mlp in zip(body.n, body.attentions, body.m, body.mlps, strict=True):
            x = x + attention(n(x))
            x = x + mlp(m(x))
        return x

    return Body(
        run,
        n=norms(num_layers),
        m=norms(num_layers),
        attentions=nn.ModuleList(Attention() for _ in range(num_layers)),
        mlps=nn.ModuleList(Mlp() for _ in range(num_layers)),
    )


def next_norm(num_layers: int = 3) -> Body:
    """The next layer's norm comes at the end of each layer, as kernels that add and normalise at once would have it."""

    def run(body: Body, x: Tensor) -> Tensor:
        h = body.n[0](x)
        for i, (attention, mlp) in enumerate(zip(body.attentions, body.mlps, strict=True)):
            x = x + attention(h)
            x = x + mlp(body.n[2 * i + 1](x))
            h = body.n[2 * i + 2](x)
        return h

    return Body(
        run,
        n=norms(2 * num_layers + 1),
        attentions=nn.ModuleList(Attention() for _ in range(num_layers)),
        mlps=nn.ModuleList(Mlp() for _ in range(num_layers)),
    )


def shared(num_layers: int = 4) -> Body:
    """One set of weights, applied again and again."""

    def run(body: Body, x: Tensor) -> Tensor:
        for _ in range(num_layers):
            h = norm(x)
            x = x + attend(h @ body.w[0], h @ body.w[1], h @ body.w[2]) @ body.w[3]
            x = x + F.gelu(norm(x) @ body.w[4]) @ body.w[5]
        return x

    return Body(run, w=weights(*[(WIDTH, WIDTH)] * 4, (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))


def of_widths(*widths: int) -> Body:
    """Plain code; the MLP of layer i is ``widths[i]`` times as wide."""

    def run(body: Body, x: Tensor) -> Tensor:
        for q, k, v, o, up, down in zip(body.q, body.k, body.v, body.o, body.up, body.down, strict=True):
            h = norm(x)
            x = x + attend(h @ q, h @ k, h @ v) @ o
            x = x + F.gelu(norm(x) @ up) @ down
        return x

    square: list[tuple[int, ...]] = [(WIDTH, WIDTH)] * len(widths)
    return Body(
        run,
        q=weights(*square),
        k=weights(*square),
        v=weights(*square),
        o=weights(*square),
        up=weights(*[(WIDTH, m * WIDTH) for m in widths]),
        down=weights(*[(m * WIDTH, WIDTH) for m in widths]),
    )


def transposed(num_layers: int = 3) -> Body:
    """Every layer transposes its weights itself."""

    def run(body: Body, x: Tensor) -> Tensor:
        for up, down in zip(body.up, body.down, strict=True):
            x = x + (norm(x) @ up.t()).relu() @ down.t()
        return x

    return Body(run, up=weights(*[(4 * WIDTH, WIDTH)] * num_layers), down=weights(*[(WIDTH, 4 * WIDTH)] * num_layers))


def hoisted(num_layers: int = 3) -> Body:
    """As ``transposed``, all of it before the first layer."""

    def run(body: Body, x: Tensor) -> Tensor:
        turned = [(up.t(), down.t()) for up, down in zip(body.up, body.down, strict=True)]
        for up, down in turned:
            x = x + (norm(x) @ up).relu() @ down
        return x

    body = transposed(num_layers)
    body.run = run
    return body


def loops(num_modules: int = 2) -> Body:
    """Modules that each run three layers in plain code."""

    def run(body: Body, x: Tensor) -> Tensor:
        for member in body.members:
            x = member(x)
        return x

    return Body(run, members=nn.ModuleList(transposed() for _ in range(num_modules)))


def experts(num_layers: int = 2, num_experts: int = 4) -> Body:
    """Every layer adds up experts that stand side by side."""

    def run(body: Body, x: Tensor) -> Tensor:
        for i, router in enumerate(body.routers):
            x = x + attend(norm(x), norm(x), norm(x)) @ body.o[i]
            h, y = norm(x), torch.zeros_like(x)
            gates = (h @ router).softmax(-1)
            for j in range(num_experts):
                at = i * num_experts + j
                y = y + gates[..., j : j + 1] * ((h @ body.up[at]).relu() @ body.down[at])
            x = x + y
        return x

    total = num_layers * num_experts
    return Body(
        run,
        routers=weights(*[(WIDTH, num_experts)] * num_layers),
        o=weights(*[(WIDTH, WIDTH)] * num_layers),
        up=weights(*[(WIDTH, 4 * WIDTH)] * total),
        down=weights(*[(4 * WIDTH, WIDTH)] * total),
    )


class EncoderDecoder(nn.Module):
    """Both sides in plain code over dicts of weights, with embeddings of their own."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.sounds, self.words = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.encoder = _layers(num_layers, "qkvo")
        self.decoder = _layers(num_layers, "qkvoabcd")

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.sounds(input_ids), self.words(labels)
        for w in self.encoder:
            x = _mix(x, x, w, "qkvo")
            x = x + F.gelu(norm(x) @ w["up"]) @ w["down"]
        x = norm(x)
        for w in self.decoder:
            y = _mix(y, y, w, "qkvo")
            y = _mix(y, x, w, "abcd")
            y = y + F.gelu(norm(y) @ w["up"]) @ w["down"]
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def _layers(num_layers: int, squares: Iterable[str]) -> nn.ModuleList:
    names = dict.fromkeys(squares, (WIDTH, WIDTH)) | {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return nn.ModuleList(
        nn.ParameterDict({n: nn.Parameter(torch.empty(*s)) for n, s in names.items()}) for _ in range(num_layers)
    )


def _mix(y: Tensor, x: Tensor, w: nn.ParameterDict, names: str) -> Tensor:
    q, k, v, o = (w[name] for name in names)
    return y + attend(norm(y) @ q, x @ k, x @ v) @ o


class GatheredLoss(nn.Module):
    """A loss gathered over the layers, and a weight for each token that only the loss reads."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.weight = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, 1)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.up, self.down = weights(*[(WIDTH, 4 * WIDTH)] * num_layers), weights(*[(4 * WIDTH, WIDTH)] * num_layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, weight, gathered = self.tokens(input_ids), self.weight(input_ids).flatten().sigmoid(), 0.0
        for up, down in zip(self.up, self.down, strict=True):
            h = (norm(x) @ up).relu()
            gathered = gathered + h.mean()
            x = x + h @ down
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * weight).mean() + 0.01 * gathered


BODIES: dict[str, Callable[[], Body]] = {
    "pieces": pieces,
    "einsums": einsums,
    "two_lists": two_lists,
    "two_lists_and_norms": two_lists_and_norms,
    "next_norm": next_norm,
    "shared": shared,
    "transposed": transposed,
    "hoisted": hoisted,
    "loops": loops,
    "experts": experts,
    "alternating": lambda: of_widths(4, 2, 4, 2, 4),
    "first_differs": lambda: of_widths(2, 4, 4, 4),
}
