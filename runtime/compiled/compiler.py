"""Whether this machine can compile: planning for `compile: true` needs no compiler, running does.

a CPU           a C++ compiler, and Python's headers
a CUDA device   the package triton
"""

from __future__ import annotations

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from passes.errors import PlanError
from planner.spec.spec import Spec

_AT = "compile"
_ELSE = ", or set compile: false"


def check_compiler(asked: bool, device: torch.device) -> None:
    """Raise PlanError if pieces are to be compiled for ``device`` and the package for it is not installed."""
    if not asked:
        return
    if device.type == "cuda":
        if find_spec("triton") is None:
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
