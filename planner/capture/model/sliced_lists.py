"""The modules around a node by their names in the model, also where a forward takes a slice of a list of modules.

layers.slice(1, None, None).0.mlp      as torch.export records it, if modules of the model are shared
layers.1.mlp                           as the model names it
"""

from __future__ import annotations

import re

from torch import fx, nn

_SLICED = re.compile(r"\.slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)\.(\d+)")


def name_sliced_modules(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Write the model's own names into the ``nn_module_stack`` of every node."""
    own: dict[str, str] = {}
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack") or {}
            if any(".slice(" in str(path) for path, _ in stack.values()):
                for path, _ in stack.values():
                    own.setdefault(path, _own_path(path, model))
                node.meta["nn_module_stack"] = {
                    key.replace(path, own[path]): (own[path], kind) for key, (path, kind) in stack.items()
                }


def _own_path(path: str, model: nn.Module) -> str:
    while (found := _SLICED.search(path)) is not None:
        *bounds, place = (None if text == "None" else int(text) for text in found.groups())
        names = list(model.get_submodule(path[: found.start()])._modules)
        path = f"{path[: found.start()]}.{names[slice(*bounds)][place or 0]}{path[found.end() :]}"
    return path
