"""Import the modules of every case once, for all forks."""

from __future__ import annotations

import gc
import importlib

import torch

_IMPORTED = ("planner.api", "runtime.engine", "runtime.verify.run", "torch.export", "torch._dynamo")


def prepare() -> None:
    """Before the first fork, and before any export."""
    torch.set_num_threads(1)
    # Autograd counts its devices once. Before any export it finds none and starts no thread, so that forks stay free.
    torch.ones(1, requires_grad=True).sum().backward()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
