"""The options of adafactor (Shazeer and Stern 2018), as torch.optim.Adafactor takes them.

optimizer: {name: adafactor, lr: 1.0e-2, options: {beta2_decay: -0.8, d: 1.0, eps: [null, 1.0e-3]}}

r, c <- means of g² over columns and rows; each keeps 1 - t^beta2_decay of its last value
u     = g / √(r c / mean(r)), divided by max(1, RMS(u) / d)
w    <- w (1 - lr · weight_decay) - max(eps[1], RMS(w)) · min(lr, 1 / √t) · u
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from passes.errors import PlanError, first_line
from planner.spec.torch_optimizers import Options


@dataclass(frozen=True, slots=True)
class AdafactorOptions:
    """``eps``: the first bounds mean squares from below (None: the machine epsilon of the main weights), the second the
    size of a parameter. ``d``: the greatest root mean square of an update before it is scaled.
    """

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    maximize: bool = False


def adafactor_options(options: Options) -> AdafactorOptions:
    """Raises PlanError for options that torch.optim.Adafactor would not take, or that mean nothing here."""
    given: dict[str, Any] = dict(options)
    known = tuple(AdafactorOptions.__dataclass_fields__)
    odd = next((name for name in given if name not in known), None)
    fix = f"write some of {', '.join(known)}, as torch.optim.Adafactor takes them"
    if odd is not None:
        raise PlanError(f"adafactor has no option {odd}", where=f"optimizer.options.{odd}", fix=fix)
    eps = given.get("eps", (None, 0.0))
    if not isinstance(eps, tuple) or len(eps) != 2:
        what = "adafactor's eps is a pair: the least mean square's root (null: the machine epsilon), and the least size"
        raise PlanError(what, where="optimizer.options.eps", fix="write eps: [null, 1.0e-3]")
    try:
        torch.optim.Adafactor([torch.zeros(1)], **given)
        return AdafactorOptions(**given)
    except (TypeError, ValueError) as error:
        what = f"adafactor does not take these options: {first_line(error)}"
        raise PlanError(what, where="optimizer.options", fix=fix) from None
