"""A loop over experts that have a layer in common: a norm in front, the first, a middle or the last product."""

from __future__ import annotations

from torch import nn

from tests.models.experts import Layer, masks

PLACES = ("norm", "first", "middle", "last")


class Shared(Layer):
    """Four experts [8 → 12 → 8], 2 a token."""

    def __init__(self, place: str, hidden: int = 8, width: int = 12) -> None:
        super().__init__(masks, hidden, width)
        common = {
            "norm": nn.LayerNorm(hidden),
            "first": nn.Linear(hidden, width),
            "middle": nn.Linear(width, width),
            "last": nn.Linear(width, hidden),
        }[place]

        def expert() -> nn.Sequential:
            first = common if place == "first" else nn.Linear(hidden, width)
            last = common if place == "last" else nn.Linear(width, hidden)
            front = [common] if place == "norm" else []
            middle = [common, nn.GELU()] if place == "middle" else []
            return nn.Sequential(*front, first, nn.GELU(), *middle, last)

        self.experts = nn.ModuleList(expert() for _ in range(self.num_experts))
