"""The model that a config.json of Hugging Face describes, built by transformers' own classes and nothing else.

Code that lies beside the config (``auto_map``) or in a repository is never run, nothing is asked, and nothing is looked
up in the network: only files of the directory are read.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from passes.errors import PlanError, Where, imported, refusing
from passes.interceptors import installed
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.recorded import build_recorded
from planner.files.text import is_directory, is_file, read_json

_MOST_MODULES = 500_000  # a config with a digit too many would be built for hours
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_LOCAL = {"trust_remote_code": False, "local_files_only": True}


Fill = Callable[[nn.Module, Path], object]


def hugging_face_model(
    path: Path, materialize: bool, seeded: Callable[[], None] | None = None, fill: Fill | None = None
) -> nn.Module:
    """Return the model of ``path``, a directory or its config.json; ``materialize`` reads or draws its weights.

    ``fill(model, path)`` gives a model on the meta device the values of quantised weights. Without it transformers
    reads them: it needs a package for some formats, and reads no matrix that its blocks do not divide.

    With ``seeded``, which sets all generators to their current states, drawn values are recorded for later and take no
    memory (``recorded_values``), if the model's construction can be recorded.

    Raises PlanError for a config that is invalid, needs code of its own, or gives a model that cannot be built.
    """
    transformers = imported("transformers", "an hf: model", where="MODEL", fix="pip install 'meshwright[hf]'")
    transformers.logging.disable_progress_bar()
    config = _read_config(path)
    if materialize and is_directory(path) and list(path.glob("*.safetensors")):
        if quantised := getattr(config, "quantization_config", None):
            if fill is not None:
                fill(model := hugging_face_model(path, False), path)
                return model
            config.quantization_config = {**quantised, "dequantize": True, "run_compressed": False}
        build: Callable[[], nn.Module] = lambda: _model_class(transformers, config).from_pretrained(  # noqa: E731
            path, config=config, use_safetensors=True, **_LOCAL
        )
    else:
        build = lambda: _model_class(transformers, config)._from_config(config)  # noqa: E731
    cannot, fix = "the model of this config cannot be built", "change the config until transformers builds the model"
    with refusing(f"{path}: {cannot}", where=Where(file=str(path)), fix=fix), offline(), _counted_modules():
        if materialize and seeded is not None:
            return _recorded(build, seeded)
        if materialize:
            return build()
        with meta_parameters():
            return build()


def import_class(path: Path) -> None:
    """Import the file of the model's class, which takes seconds; errors of the config are reported later."""
    with suppress(Exception):
        import transformers

        _model_class(transformers, _read_config(path))


def _recorded(build: Callable[[], nn.Module], seeded: Callable[[], None]) -> nn.Module:
    """Record the construction. If recording fails, build with memory, which raises the real errors, if any."""
    try:
        return build_recorded(build)
    except Exception:
        seeded()
        return build()


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    _refuse_hub_name(path)
    file = path / "config.json" if is_directory(path) else path
    where = Where(file=str(file))
    content = read_json(file, "config", fix="give a directory with config.json, or a config.json")
    if not isinstance(content, dict) or "model_type" not in content:
        raise PlanError(f"{file} has no model_type", where=where, fix="use the config.json of a transformers model")
    _refuse_code(content, where)
    _refuse_many_names(content, where)
    what, fix = f"{file} is not a config that transformers supports", "use the config of a transformers model"
    with refusing(what, where=where, fix=fix), offline():
        config = AutoConfig.from_pretrained(str(file), **_LOCAL)
    if "/" in (kernels := str(getattr(config, "_attn_implementation", ""))):
        raise PlanError(
            f"the config asks for kernels of a repository ({kernels}), which are not run",
            where=where,
            fix="remove the attention implementation from the config",
        )
    return config


def _refuse_hub_name(path: Path) -> None:
    """Refuse ``hf:gpt2`` or ``hf:meta-llama/Llama-3.2-1B`` if there is no such path: it may be a name on the Hub."""
    name = str(path)
    if _HUB_NAME.fullmatch(name) and not name.endswith(".json") and not is_directory(path) and not is_file(path):
        raise PlanError(
            f"no directory {name}; names on the Hugging Face Hub are not supported",
            where="MODEL",
            fix=(
                f"create the directory with `hf download {name} --local-dir {path.name}`, then write "
                f"hf:{path.name}; for a plan its config.json is enough"
            ),
        )


def _refuse_code(content: dict[str, Any], where: Where) -> None:
    """Refuse a config with a model that exists only as code beside it. A model that transformers has is built by its
    own code.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = content["model_type"]
    if "auto_map" in content and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise PlanError(
            f"the model_type {str(kind)[:100]!r} is code that lies beside the config (auto_map), which is not run",
            where=where,
            fix="review that code, and name its class yourself: path/file.py:callable",
        )


def _refuse_many_names(content: dict[str, Any], where: Where) -> None:
    """Refuse large numbers of names: transformers makes a table of them, which takes gigabytes and minutes."""
    for key, value in content.items():
        if isinstance(value, dict):
            _refuse_many_names(value, where)
        elif key in ("num_labels", "num_hidden_layers") and isinstance(value, int) and value > _MOST_MODULES:
            raise PlanError(
                f"{key} = {value} is more than {_MOST_MODULES}", where=where, fix=f"correct {key} in the config"
            )


def _model_class(transformers: ModuleType, config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


@contextmanager
def offline() -> Iterator[None]:
    """Prevent transformers and peft from looking anything up in the network."""
    from huggingface_hub import constants

    with installed((constants, "HF_HUB_OFFLINE", True)):
        yield


@contextmanager
def _counted_modules() -> Iterator[None]:
    """Raise PlanError once more modules are made than any model has."""
    count = 0

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise PlanError(f"more than {_MOST_MODULES} modules", fix="correct the config: a number in it is too large")

    with register_module_module_registration_hook(note):
        yield
