"""Whether a backend of CUDA graphs can run on a device: planning for one needs neither the device nor its packages.

none, emulate         everywhere
local                 on a CUDA device
transformer_engine    on a CUDA device, if the package is installed
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from passes.errors import PlanError
from planner.spec.spec import Spec

EXTRA = "meshwright[gpu]"
_AT = "cuda_graphs.impl"


def check_backend(impl: str, device: torch.device) -> None:
    """Raise PlanError if ``impl`` cannot run on ``device`` or lacks its package."""
    if impl == "transformer_engine" and find_spec("transformer_engine") is None:
        fix = f"pip install '{EXTRA}', or set impl: {'local' if device.type == 'cuda' else 'emulate'}"
        raise PlanError("transformer_engine is not installed, and cuda_graphs needs it", where=_AT, fix=fix)
    if impl in ("local", "transformer_engine") and device.type != "cuda":
        what = f"cuda_graphs.impl = {impl} captures on CUDA devices, and this process runs on {device}"
        raise PlanError(what, where=_AT, fix="set impl: emulate, which runs on any device, or impl: none")


def check_backend_here(spec: Spec) -> None:
    """The same before ranks are started on this machine, at the line of the spec."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_backend(spec.cuda_graphs.impl, device)
    except PlanError as error:
        raise spec.locate(error) from None
