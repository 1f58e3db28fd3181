"""Python code in a forward that affects gradients without being an op: kept, or refused, while it is exported.

    checkpoint(use_reentrant=True)   its function in line: the spec decides what to recompute in the backward
    torch.inference_mode()           torch.no_grad(), which is recorded
    x.data                           x.detach(), which is recorded
    torch.autograd.grad(…)           its result is detached, unless create_graph asks for more
    torch.autocast                   its casts, written out afterwards (planner.capture.gradients.regions)
    self.router.to(torch.float32)    nothing, of weights that are of float32 (planner.capture.gradients.parameters)
    a Function's apply               its forward in line, or one call (planner.capture.gradients.custom_functions)
    hooks, x.detach_(), p.data = …,
    p.grad, p.requires_grad = …,
    saved_tensors_hooks, func.grad   PlanError: the captured graph would not have them

Names are replaced for the time of one export, on the exporting thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.autograd import graph as saved_graph
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from passes.errors import PlanError, Where
from passes.interceptors import installed
from passes.program.ops.own_backward import GradientAsked, record
from planner.capture.gradients.applications import Application
from planner.capture.gradients.custom_functions import CustomFunctions
from planner.capture.gradients.parameters import HOOK_FIX, WRITE_FIX, FrozenMeanwhile, watched_cast
from planner.capture.gradients.regions import Regions
from planner.capture.gradients.trials import forward_alone, is_of_torch
from planner.capture.model.exchange import tensors_in
from planner.capture.user_lines import CallSites, called_by_user

_HOOK = "a hook on a gradient would be lost: a plan contains only the computation of the forward"
_TRANSFORM = "the forward uses a transform of torch.func (grad, jvp …), which cannot be captured"
_TRANSFORM_FIX = "use torch.autograd.grad(…, create_graph=True)"
_DETACH_FIX = "write `x = x.detach()`"


class PythonGradients:
    """Watches the exports of one model. ``asked_at``: the line of a gradient inside the forward."""

    def __init__(self) -> None:
        self.functions = CustomFunctions()
        self.regions = Regions(self._here, self._elsewhere)
        self.asked_at: Where | None = None
        self._thread = threading.get_ident()
        self._frozen = FrozenMeanwhile(self._refuse_training)
        self._data_slot: Any = Tensor.data
        self._grad_slot: Any = Tensor.grad
        self._training_slot: Any = Tensor.requires_grad
        self._node_slot: Any = Tensor.grad_fn
        self._look_at(None)

    @property
    def notes(self) -> list[str]:
        """For the user."""
        return list(dict.fromkeys((*self.functions.notes, *self.regions.warnings())))

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Around one export, or one further call of ``model``."""
        torch.overrides.get_default_nowrap_functions()  # made once for good: not while attributes are replaced
        self._look_at(model)
        try:
            with installed(*self._replacements()):
                with self._frozen:
                    yield
                self._frozen.refuse_changed()
        finally:
            self._frozen.restore()
            self._look_at(None)

    def _look_at(self, model: nn.Module | None) -> None:
        """None: a module that PyTorch imported meanwhile may hold on to a replacement, which then watches nothing and
        keeps no model alive.
        """
        self._is_over, self.regions.stops = model is None, False
        self._model = self.functions.model = model or nn.Module()
        self._sites = CallSites(self._model)

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        # Below Function.apply, which a model may have taken hold of long before: `act = MyFunction.apply`.
        yield _SingleLevelFunction, "apply", classmethod(self._apply)
        yield from self.regions.replacements()
        enter, leave = self._inference()
        yield torch.inference_mode, "__enter__", enter
        yield torch.inference_mode, "__exit__", leave
        yield torch.autograd, "_engine_run_backward", self._backward(torch.autograd._engine_run_backward)
        yield Tensor, "data", property(self._data, self._set_data)
        yield Tensor, "grad", property(self._grad, self._grad_slot.__set__, self._grad_slot.__delete__)
        yield Tensor, "requires_grad", property(self._training_slot.__get__, self._set_training)
        yield Tensor, "requires_grad_", self._training(Tensor.requires_grad_)
        yield Tensor, "grad_fn", property(self._node)
        yield Tensor, "detach_", self._refusing(Tensor.detach_, "x.detach_() changes a tensor in place", _DETACH_FIX)
        model_of = lambda: None if self._elsewhere() else self._model  # noqa: E731
        yield nn.Module, "_apply", watched_cast(nn.Module._apply, model_of, self._sites.refuse)
        hooks = (Tensor, "register_hook"), (Tensor, "register_post_accumulate_grad_hook")
        for owner, name in (*hooks, (saved_graph, "register_multi_grad_hook")):
            yield owner, name, self._refusing(getattr(owner, name), _HOOK, HOOK_FIX)
        for name in ("grad_increment_nesting", "jvp_increment_nesting"):
            original = getattr(eager_transforms, name)
            yield eager_transforms, name, self._refusing(original, _TRANSFORM, _TRANSFORM_FIX)
        yield saved_graph.saved_tensors_hooks, "__enter__", self._enter_saved(saved_graph.saved_tensors_hooks.__enter__)

    def _elsewhere(self) -> bool:
        return self._is_over or threading.get_ident() != self._thread

    def _here(self) -> Where:
        return self._sites.here()

    def _refusing(self, original: Any, what: str, fix: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if not self._elsewhere():
                self._sites.refuse(what, fix)
            return original(*args, **kwargs)

        return refuse

    # ---- Functions

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the apply of PyTorch's own base class; ``function`` is the user's class."""
        original = super(_SingleLevelFunction, function).apply  # pyright: ignore[reportAttributeAccessIssue]
        if self._elsewhere():
            return original(*args, **kwargs)
        if function is CheckpointFunction:
            return self._checkpoint(args[0], args[2:])
        if kwargs or is_of_torch(function):
            return original(*args, **kwargs)
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors_in(args)):
            # no gradient passes, whatever its forward reads beside its arguments
            stopped: Any = lambda x: x.detach() if x.requires_grad else x  # noqa: E731
            return pytree.tree_map_only(Tensor, stopped, forward_alone(function, args))
        call = self.functions.kept_as_call(Application.of(function, args, self._sites.here()), args)
        return forward_alone(function, args) if call is None else record(call, tensors_in(args))

    def _checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return run(*args)
        if torch.is_grad_enabled():
            self.functions.notes.append(
                f"checkpoint(use_reentrant=True) at {self._sites.here()} has no input with a gradient: as in "
                "PyTorch, nothing inside it gets a gradient"
            )
        with torch.no_grad():
            return run(*args)

    # ---- modes

    def _inference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return its __enter__ and __exit__; PyTorch keeps its own, as it makes fake tensors in the mode."""
        enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__

        def recorded_enter(mode: Any) -> Any:
            mode._recorded = None
            if not called_by_user(also="_contextlib.py"):  # that calls a decorated function
                return enter(mode)
            recorded = mode._recorded = torch.no_grad() if mode.mode else torch.enable_grad()
            return recorded.__enter__()

        def recorded_leave(mode: Any, *error: Any) -> Any:
            return leave(mode, *error) if mode._recorded is None else mode._recorded.__exit__(*error)

        return recorded_enter, recorded_leave

    def _enter_saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(hooks: Any) -> Any:
            is_plain = type(hooks) is saved_graph.saved_tensors_hooks
            of_user = called_by_user() if is_plain else not type(hooks).__module__.startswith("torch.")
            if of_user and not self._elsewhere():
                self._sites.refuse(
                    "saved_tensors_hooks would be lost: they may change values that the backward reads",
                    "remove them before planning the model (save_on_cpu and checkpoint may stay)",
                )
            return original(hooks)

        return enter

    # ---- gradients inside the forward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except GradientAsked as error:
                self._sites.refuse(str(error), "write the gradient or the Function with ordinary ops")
            if self._elsewhere():
                return result
            self.asked_at = self.asked_at or self._here()
            if kwargs.get("accumulate_grad"):
                self._refuse_gradients_of_parameters()
            # Recorded as plain ops, through which gradients would flow as if create_graph were set.
            elif not args[3]:
                return tuple(g if g is None else g.detach() for g in result)
            return result

        return run

    def _refuse_gradients_of_parameters(self) -> None:
        if any(self._grad_slot.__get__(p) is not None for p in self._model.parameters()):
            self._sites.refuse(
                "backward() inside the forward adds to the gradients of parameters, which would be lost",
                "use torch.autograd.grad(…, create_graph=True), or add the term to the loss",
            )

    # ---- attributes of tensors

    def _data(self, tensor: Tensor) -> Any:
        if called_by_user() and not self._elsewhere():
            return tensor.detach()
        return self._data_slot.__get__(tensor)

    def _set_data(self, tensor: Tensor, value: Any) -> None:
        if called_by_user() and not self._elsewhere():
            self._sites.refuse("the forward writes into a tensor by `.data =`, which would be lost", WRITE_FIX)
        self._data_slot.__set__(tensor, value)

    def _grad(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) and called_by_user() and not self._elsewhere():
            self._sites.refuse(
                "the forward reads the gradient of a parameter: it changes in each step, but a plan is the same "
                "for all steps",
                "use the gradient outside the forward",
            )
        return self._grad_slot.__get__(tensor)

    def _set_training(self, tensor: Tensor, value: bool) -> None:
        if isinstance(tensor, nn.Parameter) and not self._elsewhere():
            self._frozen.note(tensor, value, self._here)
        with torch._C.DisableTorchFunction():  # a mode would be given the setter that is replaced
            self._training_slot.__set__(tensor, value)

    def _refuse_training(self, where: Where) -> NoReturn:
        raise PlanError(
            "the forward changes requires_grad of a parameter, and reads it meanwhile or does not restore it",
            where=where,
            fix="freeze parameters before planning the model, or use `.detach()` in the forward",
        )

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                return original(tensor, requires_grad)
            self._set_training(tensor, requires_grad)
            return tensor

        return requires_grad_

    def _node(self, tensor: Tensor) -> Any:
        node = self._node_slot.__get__(tensor)
        refused = node is not None and called_by_user() and not self._elsewhere()
        return _WatchedNode(node, self._refusing(None, _HOOK, HOOK_FIX)) if refused else node


class _WatchedNode:
    """``x.grad_fn`` as the user sees it: refuses hooks, and has all other attributes of the node."""

    def __init__(self, node: Any, refuse: Callable[..., Any]) -> None:
        self._node = node
        self.register_hook = self.register_prehook = refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)
