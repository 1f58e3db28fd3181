"""The requirements of `compile` and `cuda_graphs` on the machine that runs a plan; planning needs none of them.

compile: true, on a CPU          a C++ compiler, and Python's headers
compile: true, on CUDA           the package triton
impl: none, emulate              nothing
impl: local                      a CUDA device
impl: transformer_engine         a CUDA device, and the package

With `compile: auto`, pieces are compiled if all ranks have CUDA devices and triton; otherwise they run op by op.
"""

import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.fields import AUTO
from planner.spec.sections import MeshSpec
from planner.spec.spec import Spec
from runtime.distributed.agreement import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.this_host import check_host

_AT = "compile"
_ELSE = ", or set compile: false"
EXTRA = "meshwright[gpu]"
_BACKEND = "cuda_graphs.impl"


def compiles(plan: Plan, asked: bool | str, groups: Groups) -> bool:
    """Return whether ranks compile the plan's pieces, the same on every rank; print a line if auto is off on GPUs.

    All ranks must call it. Raises PlanError if ``compile: true`` cannot run here.
    """
    if asked != AUTO:
        check_compiler(asked, groups.device)
        return bool(asked)
    if groups.device.type != "cuda":
        return False
    without = [rank for rank, has_it in enumerate(all_gather_json(groups, _has_triton())) if not has_it]
    reason = f"rank {without[0]} has no triton" if without else ""
    if not without and not plan.pieces:
        reason = "the plan has no pieces" if plan.spec["cluster"] else "the spec names no cluster of GPUs"
        reason = "the spec has cuda_graphs" if plan.spec["cuda_graphs"]["impl"] != "none" else reason
    if reason and groups.rank == 0:
        print(f"compile: auto is off: {reason}; compile: false silences this", file=sys.stderr, flush=True)
    return not reason


def _has_triton() -> bool:
    return find_spec("triton") is not None


def check_compiler(asked: bool | str, device: torch.device) -> None:
    """Raise PlanError if pieces must be compiled for ``device`` and the package for it is not installed."""
    if asked is not True:
        return
    if device.type == "cuda":
        if not _has_triton():
            what = f"triton is not installed, and compile: true needs it for kernels on {device}"
            raise PlanError(what, where=_AT, fix=f"pip install triton{_ELSE}")
        return
    from torch._inductor import config  # imported late: it takes a second, and few runs compile

    compilers: Any = config.cpp.cxx
    names = [name for name in (compilers if isinstance(compilers, (list, tuple)) else (compilers,)) if name]
    if not any(shutil.which(name) for name in names):
        what = f"no C++ compiler found ({', '.join(names)}), and compile: true needs one for {device}"
        raise PlanError(what, where=_AT, fix=f"install the package g++, or set CXX to a compiler{_ELSE}")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        what = "Python.h not found, and compile: true builds extensions with it"
        raise PlanError(what, where=_AT, fix=f"install the package python3-dev{_ELSE}")


def check_machine(spec: Spec) -> None:
    """Raise PlanError if this machine cannot run ``spec``; called before the capture, which takes most of the time."""
    if spec.mesh != MeshSpec():  # several ranks
        check_host()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with spec.locating():
        check_backend(spec.cuda_graphs.impl, device)
        check_compiler(spec.compile, device)


def check_backend(impl: str, device: torch.device) -> None:
    """Raise PlanError if ``impl`` cannot run on ``device`` or lacks its package."""
    if impl == "transformer_engine" and find_spec("transformer_engine") is None:
        fix = f"pip install '{EXTRA}', or set impl: {'local' if device.type == 'cuda' else 'emulate'}"
        raise PlanError("transformer_engine is not installed, and cuda_graphs needs it", where=_BACKEND, fix=fix)
    if impl in ("local", "transformer_engine") and device.type != "cuda":
        what = f"cuda_graphs.impl = {impl} captures on CUDA devices, and this process runs on {device}"
        raise PlanError(what, where=_BACKEND, fix="set impl: emulate, which runs on any device, or impl: none")
