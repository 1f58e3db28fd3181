"""The results of a forward: replaces their structure by one that export accepts, names the leaves, finds the loss.

    Result(loss=…, logits=…)            a plain dataclass → {"loss": …, "logits": …}, also inside of tuples and dicts
    {"loss": x, "extras": {"h": [y]}}   → names loss, extras.h.0

``keep_what_is_reached`` follows the gradient of that loss: weights without a gradient are treated as frozen, because in
one process their gradient is None, and the optimizer does not update them.

    torch.no_grad(): y = tower(x)          h = bottom(x).detach()          self.spare, which nothing reads

Leaves:  ``meta["grad"]`` on values that a gradient of the loss reaches, and on no others.
"""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from passes.program.program import Program
from passes.program.walks import operands, walk

_PLAIN = (torch.Tensor, int, float, complex, bool, str, type(None))


def plain_structure(output: Any) -> Any:
    """Return the results of a forward in tuples, lists and dicts alone. Raises PlanError if there is no tensor."""
    result = _plain(output)
    if result is None and output is not None:
        raise PlanError(
            f"the forward returns a {type(output).__name__}, which contains no tensors",
            where=Where(),
            fix="return a tensor, or a tuple, dict or dataclass of tensors",
        )
    return result


def _plain(value: Any) -> Any:
    """Replace unknown objects, such as a cache, by None: they contain no loss."""
    if isinstance(value, _PLAIN):
        return value
    if not pytree.tree_is_leaf(value):
        one_level, structure = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
        return pytree.tree_unflatten([_plain(inner) for inner in one_level], structure)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, SimpleNamespace):
        return {key: _plain(inner) for key, inner in vars(value).items()}
    if isinstance(value, (tuple, list)):
        return tuple(_plain(inner) for inner in value)
    return None


def select_outputs(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Return output name → node name, for the tensor outputs of the user's forward."""
    leaves: Any = exported.graph_module.graph.output_node().args[0]
    pairs = zip(exported.graph_signature.output_specs, leaves, strict=True)
    specs = [(s, leaf) for s, leaf in pairs if s.kind is OutputKind.USER_OUTPUT]
    paths = _output_paths(exported, len(specs))
    return {
        path: leaf.name
        for path, (spec, leaf) in zip(paths, specs, strict=True)
        if type(spec.arg).__name__ == "TensorArgument"
    }


def _output_paths(exported: torch.export.ExportedProgram, count: int) -> list[str]:
    """Return names such as ``loss`` or ``0`` for the leaves of the output structure."""
    spec: Any = exported.call_spec.out_spec
    dummy = pytree.tree_unflatten(list(range(count)), spec)
    paths, _ = pytree.tree_flatten_with_path(dummy)
    by_leaf = {leaf: ".".join(_key(k) for k in path) or "output" for path, leaf in paths if leaf is not None}
    return [by_leaf[i] for i in range(count)]


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def find_loss(program: Program, wanted: str) -> str:
    """Return the name of the loss node: the named output, else ``loss``, else the only scalar with a gradient."""
    leaves = program.graph.graph.output_node().args[0]
    assert isinstance(leaves, (tuple, list))
    nodes: dict[str, Any] = {name: leaves[position] for name, position in program.outputs.items()}
    listed = ", ".join(f"{name} {list(n.meta['val'].shape)}" for name, n in nodes.items()) or "none"
    scalars = {k: n for k, n in nodes.items() if n.meta["val"].numel() == 1 and n.meta["grad"]}
    if wanted != "auto":
        if wanted not in scalars:
            raise PlanError(
                f"the model has no scalar output `{wanted}` with a gradient (outputs: {listed})",
                where="loss",
                fix="name one of the outputs that is a scalar loss",
            )
        return scalars[wanted].name
    if "loss" in scalars:
        return scalars["loss"].name
    if len(scalars) == 1:
        return next(iter(scalars.values())).name
    if not scalars:
        raise PlanError(
            f"no output of the model is a loss (outputs: {listed})",
            where="loss",
            fix="return a scalar loss from forward; a Hugging Face model needs `labels` among its inputs",
        )
    raise PlanError(
        f"several outputs could be the loss: {', '.join(scalars)}", where="loss", fix="set loss: {output: <name>}"
    )


def keep_what_is_reached(program: Program) -> None:
    """Clear ``meta["grad"]`` where no gradient arrives; such weights become ``program.untrained``."""
    reached = set(walk([program.node(program.loss)], operands, into=_carries))
    for node in program.graph.graph.nodes:
        if _carries(node) and node not in reached:
            node.meta["grad"] = False
            if node.name in program.parameters:
                program.untrained.append(program.parameters[node.name])


def _carries(node: fx.Node) -> bool:
    return bool(node.meta.get("grad"))
