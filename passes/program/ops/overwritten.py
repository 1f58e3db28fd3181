"""Values that may be overwritten: no backward reads them again."""

from __future__ import annotations

import torch
from torch import fx

from passes.program.ops.aten import aten
from passes.program.ops.groups import RESHAPES, WITH_WEIGHT, Ops

OVERWRITTEN = WITH_WEIGHT | Ops("bmm")  # their backward does not read what they make


def loses_logits(node: fx.Node) -> bool:
    """Whether a cross-entropy may overwrite its logits: in no half precision, and if it is their only reader.

    The op that makes them must allocate them, and not read them in its backward. The target [n] are classes:
    probabilities of classes stay with torch.
    """
    logits, target = (*node.args, None, None)[:2]
    if not (isinstance(logits, fx.Node) and isinstance(target, fx.Node)):
        return False
    value = logits.meta["val"]
    if value.dim() != 2 or target.meta["val"].dim() != 1 or value.dtype not in (torch.float32, torch.float64):
        return False
    while logits.target in RESHAPES and len(logits.users) == 1 and isinstance(logits.args[0], fx.Node):
        logits = logits.args[0]
    is_cast = logits.target is aten.to.dtype and _dtypes(logits) == 2
    makes = is_cast or logits.target in WITH_WEIGHT or logits.target is aten.add.Tensor
    return makes and len(logits.users) == 1


def _dtypes(cast: fx.Node) -> int:
    return len({node.meta["val"].dtype for node in (cast, *cast.all_input_nodes)})
