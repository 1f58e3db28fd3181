"""Refuse torch.func inside the forward (vmap, grad, jvp …): export records calls of it that mean nothing afterwards."""

from __future__ import annotations

import os
import traceback

import torch
from torch import fx

from planner.errors import PlanError, Where
from planner.source_lines import where_of

_FUNCTORCH = os.path.join(os.path.dirname(torch.__file__), "_functorch")
_TRANSFORMS = {os.path.join(_FUNCTORCH, file) for file in ("apis.py", "vmap.py", "eager_transforms.py")}
_WHAT = "the forward uses a transform of torch.func (vmap, grad, jvp …), which cannot be captured"
_FIX = "write it out: vmap as batched operations, grad as torch.autograd.grad(…, create_graph=True)"


def refuse_function_transforms(module: fx.GraphModule) -> None:
    """Raise PlanError at the first call that is no op: those that a transform leaves behind."""
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise PlanError(_WHAT, where=where_of(node), fix=_FIX)


def refuse_failed_transform(error: BaseException, where: Where) -> None:
    """Raise PlanError where export has failed inside of a transform."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not files.isdisjoint(_TRANSFORMS):
        raise PlanError(_WHAT, where=where, fix=_FIX) from error
