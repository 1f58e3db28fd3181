"""Hooks that PyTorch calls for every module there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules import module

GLOBAL_HOOKS = [name for name in vars(module) if name.startswith("_global_") and name.endswith("hooks")]


@contextmanager
def global_hooks_kept() -> Iterator[None]:
    """Leave them as they were: torch.export of torch 2.11 keeps one of its own if a forward raises."""
    before = {name: dict(vars(module)[name]) for name in GLOBAL_HOOKS}
    try:
        yield
    finally:
        for name, hooks in before.items():
            now = vars(module)[name]
            for key in now.keys() - hooks.keys():
                del now[key]
