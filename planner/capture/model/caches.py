"""What a model does beside its step in eager mode and a traced step does not need: key-value caches, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Without key-value caches and wrappers of recomputation, which are of no use in a traced training step."""
    changed: list[tuple[Any, str]] = []
    try:
        for module in model.modules():
            config = getattr(module, "config", None)
            for owner, name in ((config, "use_cache"), (module, "gradient_checkpointing")):
                if getattr(owner, name, None) is True:
                    setattr(owner, name, False)
                    changed.append((owner, name))
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)
