"""Writes, casts and hooks of a forward on its own parameters and buffers: kept, or refused if no plan can keep them.

    nn.Embedding(max_norm=…)                      PlanError: the engine's weights change by the optimizer's update alone
    with torch.no_grad(): w.mul_(0.9)             PlanError, also through views, w.data and w.detach()
    running_mean, num_batches_tracked             written for later evaluation: the plan drops the update, and says so
    codebook.mul_(d).add_(…); x @ codebook        PlanError: a plan would train with the first values
    cache[:n] = freqs; use(cache[:n])             kept, if later calls read and leave the same
    self.router = self.router.to(torch.float32)   no effect on float32 weights; of others PlanError, since the first
                                                  forward changes them for good
    requires_grad_(False), then (True)            as peft's ``disable_adapter()``: no effect if none is read meanwhile
    module.register_full_backward_hook,           PlanError: capture keeps the forward alone, so hooks on gradients
    parameter.register_hook, the global forms     would be lost; forward hooks are part of the forward

Writes are read off the exported graph before it is made functional, while they are still visible. Hooks that a forward
sets on its tensors are found while it is exported (planner.capture.gradients.python_side).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from passes.program.known_values import is_made_of
from passes.program.source_lines import where_of, where_of_definition
from passes.program.walks import ancestors
from planner.capture.functional import viewed, written_to
from planner.capture.model.exchange import storage_of

WRITE_FIX = "compute a new value in the forward (`w = self.weight * c`), or change the weight outside the forward"
MAX_NORM_FIX = "remove max_norm, and divide by the norm in the forward: `F.embedding(ids, normalised(self.weight))`"
BUFFER_FIX = "update it outside the forward, or pass changing values as an input"
CAST_FIX = "cast at the use (`F.linear(x, self.weight.to(x.dtype))`), or give the weights that dtype before planning"
_ATTRIBUTES = ("__get__", "__set__", "requires_grad_")
HOOK_FIX = (
    "remove the hook, and scale the gradient in the forward: `c * x + ((1 - c) * x).detach()` multiplies the "
    "gradient of x by c, a number or a mask"
)


def refuse_parameter_writes(module: fx.GraphModule, parameters: Mapping[str, str]) -> None:
    """Raise PlanError at the first write to a parameter. ``parameters``: placeholder name → dotted name."""
    names = {node: parameters[node.name] for node in module.graph.nodes if node.name in parameters}
    for node, fqn in _writes(module.graph, names):
        renormalises = "embedding_renorm" in str(node.target)
        how = " (max_norm rescales its rows)" if renormalises else ""
        raise PlanError(
            f"the forward writes into parameter {fqn}{how}: the update would be lost",
            where=where_of(node),
            fix=MAX_NORM_FIX if renormalises else WRITE_FIX,
        )


def _writes(graph: fx.Graph, names: Mapping[fx.Node, str]) -> Iterator[tuple[fx.Node, str]]:
    """Yield (node that writes, the parameter's name)."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = viewed(node)
        owners[node] = node if source is None else owners[source]
        yield from ((node, names[owners[n]]) for n in written_to(node) if owners[n] in names)


def notes_of_writes(
    graph: fx.Graph,
    written: Mapping[str, str],
    names: Mapping[str, str],
    fixed: set[str],
    outputs: list[str],
    is_cache: Callable[[Mapping[str, str]], bool],
) -> Iterator[str]:
    """Yield a note for each write of a value that changes from step to step.

    Raises PlanError if the loss reads a buffer that this call and later ones write, unless ``is_cache`` says that later
    calls compute the same.

    ``written``: placeholder → the node of its last value; ``names``: placeholder → dotted name; ``fixed``: placeholders
    that are the same at each step, if nothing writes them; ``outputs``: the results of the forward.
    """
    nodes = {node.name: node for node in graph.nodes}
    reaching = ancestors([nodes[name] for name in outputs])
    the_same = {nodes[name] for name in fixed - written.keys() if name in nodes}
    changing = {h: last for h, last in written.items() if h in names and not is_made_of(nodes[last], the_same)}
    read = {holder: last for holder, last in changing.items() if nodes[holder] in reaching}
    if read and not is_cache(read):
        holder, last = next(iter(read.items()))
        raise PlanError(
            f"the forward updates {names[holder]} and computes with it: a plan would freeze its first value",
            where=where_of(nodes[last]),
            fix=BUFFER_FIX,
        )
    for holder in (h for h in changing if h not in read):
        yield f"the forward updates buffer {names[holder]}: the plan drops this update"


def watched_cast(
    original: Callable[..., Any], model_of: Callable[[], nn.Module | None], refuse: Callable[[str, str], NoReturn]
) -> Callable[..., Any]:
    """Return a replacement of ``nn.Module._apply``. ``model_of``: the model with a running forward, or None."""

    def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        model = model_of()
        prefix = None if model is None else _name_of(module, model)
        if prefix is None:
            return original(module, fn, *args, **kwargs)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            made = fn(tensor)
            if made is not tensor and storage_of(made) != storage_of(tensor):
                refuse(f"the forward casts or moves its own {prefix}{name}: {_change(tensor, made)}", CAST_FIX)
        return module

    return _apply


def _name_of(module: nn.Module, model: nn.Module) -> str | None:
    """Return the prefix of the names of a module's weights; None for a module of another model (``CallSites``)."""
    names = (name for name, inner in model.named_modules() if vars(inner) is vars(module))
    return next((f"{name}." if name else "" for name in names), None)


def _change(before: Tensor, after: Tensor) -> str:
    pairs = ((before.dtype, after.dtype), (before.device, after.device), (tuple(before.shape), tuple(after.shape)))
    return next((f"from {a} to {b}" for a, b in pairs if a != b), "into other memory")


class FrozenMeanwhile(TorchFunctionMode):
    """Owns the parameters with a changed ``requires_grad``: their own setting, and the line that changed it."""

    def __init__(self, refuse: Callable[[Where], NoReturn]) -> None:
        super().__init__()
        self._changed: dict[int, tuple[Tensor, bool, Where]] = {}
        self._refuse = refuse

    def note(self, parameter: Tensor, value: bool, where: Callable[[], Where]) -> None:
        """Note that ``requires_grad`` of a parameter is set to ``value``, or restored."""
        if id(parameter) in self._changed and self._changed[id(parameter)][1] == value:
            del self._changed[id(parameter)]
        elif parameter.requires_grad != value:
            self._changed[id(parameter)] = parameter, parameter.requires_grad, where()

    def refuse_changed(self) -> None:
        """Raise PlanError if a change was not undone."""
        for _, _, where in self._changed.values():
            self._refuse(where)

    def restore(self) -> None:
        changed, self._changed = list(self._changed.values()), {}
        for parameter, before, _ in changed:
            parameter.requires_grad_(before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._changed and getattr(func, "__name__", "") not in _ATTRIBUTES:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._changed and self._changed[id(leaf)][1]:
                    self._refuse(self._changed[id(leaf)][2])
        return func(*args, **(kwargs or {}))


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise PlanError at the first hook on a gradient, with its owner and the line of its function."""
    for what, module, hook in _hooks_on(model):
        raise PlanError(
            f"a hook on the gradients of {what} would be lost: a plan contains only the computation of the forward",
            where=where_of_definition(hook, module) or Where(module),
            fix=HOOK_FIX,
        )


def _hooks_on(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield (owner in words, module path, function) of every hook on gradients."""
    for kind in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        for hook in getattr(torch_modules, kind, {}).values():
            yield "every module", "", hook
    for path, module in model.named_modules():
        for kind in ("_backward_pre_hooks", "_backward_hooks"):
            for hook in (getattr(module, kind, None) or {}).values():
                yield f"module {path or type(module).__name__}", path, hook
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, kind, None) or {}).values():
                yield f"parameter {name}", name.rpartition(".")[0], hook
