"""MODEL with adapters: a base, and the adapter_config.json from which peft makes an adapter for it.

    base with weights in files    parameters on meta; peft's construction is recorded (recorded.py), so that an adapter
                                  that begins as a function of the base's weights gets its values from the files
    base without files            drawn; then the adapter from the next seed

So in each case an adapter's values are those of one process that seeds, loads the base and calls get_peft_model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from passes.errors import PlanError, Where, first_line
from planner.capture.model.hugging_face import offline
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.recorded import build_recorded
from planner.files.json_text import read_json
from planner.files.text import is_directory

OPTION = " --peft "
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def named(model: str, peft: Path | None) -> str:
    """The one text that names the model, with its adapters if there are any."""
    return model if peft is None else f"{model}{OPTION}{peft}"


def adapter_directory(reference: str) -> Path | None:
    """The directory with trained adapters that MODEL names; None for a mere config."""
    path = Path(reference.partition(OPTION)[2])
    return path if OPTION in reference and is_directory(path) and (path / WEIGHTS).exists() else None


def with_adapters(
    base_of: Callable[[bool], nn.Module], name: str, path: Path, materialize: bool, in_files: bool, later: bool,
    reseed: Callable[[], None],
) -> nn.Module:  # fmt: skip
    """The model of peft. ``base_of``: builds the base, with values or on meta; ``name``: of the base.

    ``in_files``: the base's values lie in files. ``later``: drawn values are recorded. ``reseed`` seeds the adapter.
    Raises PlanError for a config that is invalid or does not fit the base.
    """
    file = path / CONFIG if is_directory(path) else path

    def wrapped(base: nn.Module) -> nn.Module:
        base.__dict__["name_or_path"] = name
        reseed()
        return _wrapped(base, file)

    if in_files and not materialize:
        try:
            base = base_of(False)
            return build_recorded(lambda: wrapped(base), base)
        except PlanError:
            raise
        except Exception:  # peft's construction asks for values of the base, or cannot be recorded
            return wrapped(base_of(True))
    if materialize and later:
        try:
            return build_recorded(lambda: wrapped(base_of(True)))
        except Exception:  # if recording fails, building with memory raises the real errors, if any
            return wrapped(base_of(True))
    if materialize:
        return wrapped(base_of(True))
    base = base_of(False)
    with meta_parameters():
        return wrapped(base)


def _wrapped(base: nn.Module, file: Path) -> nn.Module:
    peft = _package()
    where, fix = Where(file=str(file)), "correct the config: peft's documentation lists the settings of each method"
    config = _config(peft, file, where, fix)
    try:
        with offline(), warnings.catch_warnings(action="ignore"):
            return peft.get_peft_model(base, config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"peft cannot make this adapter: {first_line(error)}", where=where, fix=fix) from error


def _package() -> Any:
    try:
        return import_module("peft")
    except ImportError:
        fix = "pip install 'meshwright[peft]'"
        raise PlanError("--peft needs the package peft", where="--peft", fix=fix) from None


def _config(peft: Any, file: Path, where: Where, fix: str) -> Any:
    content = read_json(file, "adapter config", fix="give an adapter_config.json, or a directory that has one")
    kinds = {str(kind.value): kind for kind in peft.PeftType}
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if not isinstance(content, dict) or kind not in kinds:
        raise PlanError(
            f"{file.name} has no peft_type that this version of peft has", where=where, fix=f"write {', '.join(kinds)}"
        )
    settings = {key: value for key, value in content.items() if key not in ("auto_mapping", "base_model_name_or_path")}
    try:
        return peft.get_peft_config(settings | {"inference_mode": False})
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"{file.name} is no config of peft: {first_line(error)}", where=where, fix=fix) from error
