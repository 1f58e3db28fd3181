"""Turn MODEL of the command line into an ``nn.Module``.

    package.module:callable     an importable function or class that returns a module
    path/file.py:callable       the same in a file; its directory is put first on the import path
    hf:DIR_OR_CONFIG.json       the Hugging Face architecture named by config.json, no weights read
    MODEL --peft CONFIG         any of these, with the adapters of an adapter_config.json

Hugging Face models are on the meta device (parameters without storage, buffers real, since rotary tables are data)
unless ``materialize`` asks for weights: those beside the config if there are any, else seeded ones.

An adapter's values are those of one process that seeds, loads the base and calls get_peft_model:

    base with weights in files    parameters on meta; peft's construction is recorded (recorded.py), so that an adapter
                                  that begins as a function of the base's weights gets its values from the files
    base without files            drawn; then the adapter from the next seed
"""

import logging
import os
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from passes.errors import PlanError, Where, imported, refusing
from planner.capture.model.eager import uncompiled
from planner.capture.model.exchange import seed_generators
from planner.capture.model.hugging_face import Fill, hugging_face_model, import_class, offline
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.recorded import build_recorded
from planner.files.named_code import NamedCode, line_of
from planner.files.text import is_directory, read_json, shorten

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
FORMS = "package.module:callable, path/file.py:callable, or hf:DIR_OR_CONFIG.json"
OPTION = " --peft "
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load_model(
    reference: str,
    *,
    materialize: bool = False,
    seed: int = 1234,
    values_later: bool = False,
    fill: Fill | None = None,
) -> nn.Module:
    """Return the module that ``reference`` names. ``materialize`` gives an ``hf:`` model real weights, the same for a
    seed; ``fill`` reads those that are quantised (planner.capture.model.hugging_face).

    With ``values_later`` drawn weights stay on the meta device: an Engine makes those of its rank when it needs them.
    Raises PlanError for a malformed reference, anything that cannot be imported, and a callable that fails.
    """
    quiet_transformers()
    if OPTION in reference:
        return _with_adapters(reference, materialize, seed, values_later, fill)
    if reference.startswith("hf:"):
        seed_generators(seed)
        path = Path(reference.removeprefix("hf:"))
        return hugging_face_model(path, materialize, partial(seed_generators, seed) if values_later else None, fill)
    named = NamedCode(reference, "MODEL", FORMS)
    name, attribute = named.parts
    seed_generators(seed)  # before the import: a file may build its model right there
    source = named.module(name)
    seed_generators(seed)
    return uncompiled(_call(named.found(source, attribute), reference))


def load_to_plan(reference: str, seed: int, *, has_values: bool = True) -> nn.Module:
    """Return the module for a command that plans and runs it: values that are not in files of ``reference`` are real,
    or drawn when an Engine needs them. ``has_values``: False if a save has all of them. Raises as ``load_model`` does.
    """
    materialize = has_values and pretrained_directory(reference) is None
    return load_model(reference, materialize=materialize, seed=seed, values_later=True)


def import_packages(reference: str) -> None:
    """Import the parts of packages that ``load_model`` will need, and none of the user's files."""
    base, option, _ = reference.partition(OPTION)
    if base.startswith("hf:"):
        quiet_transformers()
        import_class(Path(base.removeprefix("hf:")))
    if option:
        with suppress(ImportError):
            import_module("peft")


def quiet_transformers() -> None:
    """Silence transformers' advice for direct callers of a model, now and later, unless TRANSFORMERS_VERBOSITY asks for
    it.
    """
    logger = logging.getLogger("transformers")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"transformers\b")
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logger.setLevel(logging.ERROR)


def pretrained_directory(reference: str) -> Path | None:
    """Return the directory of ``hf:DIR`` if it holds weights, in any format; None for every other MODEL."""
    directory = Path(reference.partition(OPTION)[0].removeprefix("hf:"))
    if not reference.startswith("hf:") or not is_directory(directory):
        return None
    return directory if any(next(directory.glob(kind), None) for kind in WEIGHT_FILES) else None


def _call(build: Any, reference: str) -> nn.Module:
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise PlanError(
            f"MODEL {shorten(reference)!r} is a {type(build).__name__}, not a callable",
            fix="name a function that returns a model",
        )
    failed = f"MODEL {shorten(reference)!r} failed when called without arguments"
    with refusing(failed, where=line_of, fix="name a callable that needs no arguments and returns an nn.Module"):
        model = build()
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"MODEL {shorten(reference)!r} returned a {type(model).__name__}, not an nn.Module",
            fix="return the model itself",
        )
    return model


def named(model: str, peft: Path | None) -> str:
    """Return one text that names the model, with its adapters if there are any."""
    return model if peft is None else f"{model}{OPTION}{peft}"


def adapter_directory(reference: str) -> Path | None:
    """Return the directory with trained adapters that MODEL names; None for a mere config."""
    path = Path(reference.partition(OPTION)[2])
    return path if OPTION in reference and is_directory(path) and (path / WEIGHTS).exists() else None


def _with_adapters(reference: str, materialize: bool, seed: int, values_later: bool, fill: Fill | None) -> nn.Module:
    """Return the model of peft. Raises PlanError for a config that is invalid or does not fit the base."""
    base, _, adapters = reference.partition(OPTION)
    file = Path(adapters) / CONFIG if is_directory(Path(adapters)) else Path(adapters)

    def based(materialized: bool) -> nn.Module:
        return load_model(base, materialize=materialized, seed=seed, fill=fill)

    def wrapped(model: nn.Module) -> nn.Module:
        model.__dict__["name_or_path"] = base.removeprefix("hf:")
        seed_generators(seed + 1)
        return _wrapped(model, file)

    if not materialize and pretrained_directory(base) is not None:
        try:
            model = based(False)
            return build_recorded(lambda: wrapped(model), model)
        except PlanError:
            raise
        except Exception:  # peft's construction asks for values of the base, or cannot be recorded
            return wrapped(based(True))
    if materialize and values_later:
        with suppress(Exception):  # if recording fails, building with memory raises the real errors, if any
            return build_recorded(lambda: wrapped(based(True)))
    if materialize:
        return wrapped(based(True))
    model = based(False)
    with meta_parameters():
        return wrapped(model)


def _wrapped(base: nn.Module, file: Path) -> nn.Module:
    peft = imported("peft", "--peft", where="--peft", fix="pip install 'meshwright[peft]'")
    where, fix = Where(file=str(file)), "correct the config: peft's documentation lists the settings of each method"
    config = _config(peft, file, where, fix)
    kinds = ValueError, TypeError, KeyError, AttributeError
    cannot = refusing("peft cannot make this adapter", where=where, fix=fix, of=kinds)
    with cannot, offline(), warnings.catch_warnings(action="ignore"):
        return peft.get_peft_model(base, config)


def _config(peft: Any, file: Path, where: Where, fix: str) -> Any:
    content = read_json(file, "adapter config", fix="give an adapter_config.json, or a directory that has one")
    kinds = {str(kind.value): kind for kind in peft.PeftType}
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if not isinstance(content, dict) or kind not in kinds:
        raise PlanError(
            f"{file.name} has no peft_type that this version of peft has", where=where, fix=f"write {', '.join(kinds)}"
        )
    settings = {key: value for key, value in content.items() if key not in ("auto_mapping", "base_model_name_or_path")}
    with refusing(f"{file.name} is no config of peft", where=where, fix=fix, of=(ValueError, TypeError, KeyError)):
        return peft.get_peft_config(settings | {"inference_mode": False})
