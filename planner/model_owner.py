"""The user's model: held until an engine has copied its shards, then only referred to."""

from __future__ import annotations

import weakref

from torch import nn

from planner.capture.model.compiled import uncompiled
from planner.capture.model.hub_format import HubFormat, hub_format


class ModelOwner:
    """Owns the model of a plan. ``hub``: the format of its checkpoints, which are loaded and saved without it."""

    def __init__(self, model: nn.Module, hub: HubFormat | None = None) -> None:
        self.take(model, hub or hub_format(uncompiled(model)))

    def take(self, model: nn.Module, hub: HubFormat) -> None:
        """Hold ``model`` in place of the one that was planned."""
        self._model: nn.Module | None = model
        self._reference = weakref.ref(model)
        self.hub = hub

    @property
    def model(self) -> nn.Module | None:
        """Without wrappers of torch.compile; None when it is gone."""
        model = self._reference()
        return None if model is None else uncompiled(model)

    def release(self) -> None:
        """Keep only a weak reference: the full model must not outlive the copying of shards."""
        self._model = None
