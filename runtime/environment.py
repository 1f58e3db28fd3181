"""The environment for a bug report: versions, devices, backends, compilers, settings; no host names and no paths."""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires, version

import torch
import torch.distributed as dist

PACKAGE = "meshwright"
EXTRAS = ("transformers", "tokenizers", "transformer-engine", "triton", "matplotlib", "tensorboard")
_NAME = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9]")  # of a requirement, before its versions
COMPILERS = ("c++", "g++", "clang++", "ptxas")
_SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")
_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_", "PYTORCH_ALLOC_", "PYTORCH_CUDA_ALLOC_")
_HIDDEN = ("_IFNAME", "_DIR", "_FILE", "_PATH", "_ADDR", "_HOSTS")  # names of networks, files and machines


def environment() -> dict[str, dict[str, str]]:
    """Return heading → name → value, in the order of the report. Uses no device and starts no process."""
    parts = {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "torch.distributed": _back_ends(),
        "compilers": tuple((name, "found" if shutil.which(name) else "none") for name in COMPILERS),
        "settings": _settings(),
    }
    return {title: dict(lines) for title, lines in parts.items()}


def _versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of meshwright, Python, the dependencies and the extras."""
    try:
        required = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        required = ["torch"]
    needed = (_NAME.match(line) for line in required if "extra ==" not in line)
    names = [*(name[0] for name in needed if name), *EXTRAS]
    own = (PACKAGE, installed_version(PACKAGE)), ("Python", platform.python_version())
    return *own, *((name, installed_version(name)) for name in names)


def installed_version(package: str) -> str:
    """Return the version of a package by its metadata, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> tuple[tuple[str, str], ...]:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}"
    return (
        ("system", f"{system} ({platform.machine()})"),
        ("C library", " ".join(platform.libc_ver()) or "unknown"),
        ("cores", str(os.cpu_count())),
        ("memory", f"{gib:.1f} GiB"),
        ("threads of torch", str(torch.get_num_threads())),
    )


def _devices() -> tuple[tuple[str, str], ...]:
    if not torch.cuda.is_available():
        return (("CUDA", f"none (torch is built for {torch.version.cuda or 'no CUDA'})"),)
    found = [("CUDA of torch", str(torch.version.cuda))]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        gib = device.total_memory / 2**30
        found.append((f"cuda:{index}", f"{device.name}, {gib:.1f} GiB, compute {device.major}.{device.minor}"))
    return tuple(found)


def _back_ends() -> tuple[tuple[str, str], ...]:
    nccl = "none"
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    gloo = "found" if dist.is_gloo_available() else "none"
    return (("NCCL", nccl), ("gloo", gloo))


def _settings() -> tuple[tuple[str, str], ...]:
    """Return environment variables that change a run; values that name a machine, a network or a file are hidden."""
    found = sorted(name for name in os.environ if name in _SETTINGS or name.startswith(_FAMILIES))
    return tuple((name, "(set)" if name.endswith(_HIDDEN) else os.environ[name]) for name in found) or (
        ("none that affects meshwright", "-"),
    )
