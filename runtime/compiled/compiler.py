"""Whether ranks compile: planning for `compile: true` needs no compiler, running does.

a CPU           a C++ compiler, and Python's headers
a CUDA device   the package triton

With `compile: auto` ranks compile on CUDA devices that all have triton; otherwise pieces run op by op.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups

_AT = "compile"
_ELSE = ", or set compile: false"


def compiles(plan: Plan, asked: bool | str, groups: Groups) -> bool:
    """Whether ranks compile the plan's pieces, the same on every rank; one line on stderr if auto is off on GPUs.

    The same call on every rank. Raises PlanError if ``compile: true`` cannot run here.
    """
    if asked != AUTO:
        check_compiler(asked, groups.device)
        return bool(asked)
    if groups.device.type != "cuda":
        return False
    without = [rank for rank, has_it in enumerate(all_gather_json(groups, _has_triton())) if not has_it]
    reason = f"rank {without[0]} has no triton" if without else "" if plan.pieces else _why_none(plan)
    if reason and groups.rank == 0:
        print(f"compile: auto is off: {reason}; compile: false silences this", file=sys.stderr, flush=True)
    return not reason


def _why_none(plan: Plan) -> str:
    if plan.spec["cuda_graphs"]["impl"] != "none":
        return "the spec has cuda_graphs"
    return "the plan has no pieces" if plan.spec["cluster"] else "the spec names no cluster of GPUs"


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
    names = _cpp_compilers()
    if not any(shutil.which(name) for name in names):
        what = f"no C++ compiler found ({', '.join(names)}), and compile: true needs one for {device}"
        raise PlanError(what, where=_AT, fix=f"install the package g++, or set CXX to a compiler{_ELSE}")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        what = "Python.h not found, and compile: true builds extensions with it"
        raise PlanError(what, where=_AT, fix=f"install the package python3-dev{_ELSE}")


def check_compiler_here(spec: Spec) -> None:
    """The same before ranks are started on this machine, at the line of the spec."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_compiler(spec.compile, device)
    except PlanError as error:
        raise spec.locate(error) from None


def _cpp_compilers() -> list[str]:
    """Those that Inductor tries, in its order."""
    from torch._inductor import config  # it takes a second to import, and few runs compile

    given = config.cpp.cxx
    return [name for name in (given if isinstance(given, (list, tuple)) else (given,)) if name]
