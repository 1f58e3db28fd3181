"""The user's own module, not a copy, run in eager mode with the weights of a step.

    module.weight  ⇄  gathered weight      during the audit; the Python object, its views and references to it stay

The module runs in the mode (training or not) in which it was planned, with gradients on, so that its code takes the
path of training. Dropout is the identity, as in ``Engine.evaluate``; nothing is saved for a backward.
``model.eval()`` would turn off more than dropout: other branches, norms and losses depend on the mode too.

The lowest precision in which a module computes determines the tolerance between two runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from passes.errors import PlanError
from passes.interceptors import installed
from planner.capture.forms import forms_of
from planner.capture.gradients.applications import LowestPrecision
from planner.capture.model.eager import caches_off, in_eager_mode
from planner.capture.model.exchange import swap
from planner.capture.model.meta_init import buffer_value
from planner.capture.outputs import plain_structure
from planner.capture.own_loss import apply_loss
from planner.spec.spec import Spec
from runtime.weights.own_methods import generators_as_before

Batch = Mapping[str, Tensor]
_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_}
_MULTI_HEAD = [*inspect.signature(F.multi_head_attention_forward).parameters]
_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: _MULTI_HEAD.index("dropout_p")}
# In half precision, a loss below this one may differ as much as this one: cross-entropy subtracts logits that are
# larger than their difference. Logits of 4 to 8 in bfloat16 are rounded by up to 0.016 on each side.
SMALL_LOSS = 2.0
NOISE = 8.0  # allowed error of any gradient, in rounding errors of the model's largest gradient


class OwnModule:
    """The user's module, which has its original values between audits.

    ``precision``: the lowest dtype in which its forwards have computed so far.
    """

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self._model, self._wanted = apply_loss(model, spec.loss, forms_of(spec.inputs, with_values=False))
        self._modes = [(module, "training", module.training) for module in model.modules()]
        cast = spec.precision.parameters
        self._dtype: torch.dtype | None = None if cast is None else getattr(torch, cast)
        self.precision = torch.float64

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the module ``weights`` (all of them), ``buffers``, and copies of its other buffers.

        ``weights`` hold the module's own values meanwhile.
        """
        with ExitStack() as stack:
            for tensor, value in self._weights(weights):
                stack.enter_context(_exchanged(tensor, value))
            for tensor, value in self._buffers(buffers):
                stack.enter_context(_swapped(tensor, value))
            yield

    def loss(self, batch: Batch) -> float:
        """Return the loss of one forward. Raises PlanError if the module fails on the CPU, or returns no loss."""
        with ExitStack() as stack:
            in_its_modes = installed(*self._modes)
            for context in (in_eager_mode(), caches_off(self._model), in_its_modes, generators_as_before()):
                stack.enter_context(context)
            lowest = stack.enter_context(LowestPrecision())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _not_there))
            stack.enter_context(NoDropout())
            try:
                output = self._model(**batch)
            except PlanError:
                raise
            except Exception as error:
                what = f"audit: your module failed in eager mode on the CPU: {type(error).__name__}: {error}"
                fix = "make the model work on the CPU with one microbatch, or remove audit"
                raise PlanError(what, where="audit", fix=fix) from error
        if torch.finfo(lowest.dtype).eps > torch.finfo(self.precision).eps:
            self.precision = lowest.dtype
        return loss_of(output, self._wanted).item()

    def _weights(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter, its value); a tied parameter once."""
        for name, parameter in self._model.named_parameters():
            yield parameter, weights[name].view(parameter.shape)

    def _buffers(self, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (buffer, a copy of its value), as a forward may write into buffers."""
        for name, buffer in self._model.named_buffers():
            if buffer.layout is torch.strided:
                value = (values[name] if name in values else buffer_value(self._model, name)).detach().cpu()
                is_cast = self._dtype is not None and value.is_floating_point()
                yield buffer, value.to(self._dtype if is_cast else value.dtype, copy=True)


@contextmanager
def _exchanged(tensor: Tensor, value: Tensor) -> Iterator[None]:
    """Swap the contents, so that views of the tensor see the new values; or swap the tensors if device, dtype or layout
    differ.
    """
    if tensor.device != value.device or tensor.dtype != value.dtype or tensor.layout is not torch.strided:
        with _swapped(tensor, value):
            yield
        return
    _change_contents(tensor.data, value)
    try:
        yield
    finally:
        _change_contents(tensor.data, value)


def _change_contents(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


@contextmanager
def _swapped(tensor: Tensor, value: Tensor) -> Iterator[None]:
    """Make the Python object ``tensor`` hold ``value``, with its class and attributes unchanged."""
    other = stand_in(tensor, value)
    swap(tensor, other)
    try:
        yield
    finally:
        swap(tensor, other)


def stand_in(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter with the attributes of ``tensor``, to swap them, if ``tensor`` is a parameter."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    parameter.__dict__.update(vars(tensor))  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


def _drop(saved: Any) -> None:
    """Save nothing for a backward."""


def _not_there(dropped: None) -> Tensor:
    raise RuntimeError(
        "a forward that runs its own backward cannot be audited: an audit saves no tensors for a backward"
    )


def loss_of(output: Any, wanted: str) -> Tensor:
    """Return the loss among a model's outputs: named ``wanted``, else ``loss``, else the only scalar with gradient."""
    output = plain_structure(output)
    if isinstance(output, Tensor):
        return output
    named = output.items() if isinstance(output, Mapping) else enumerate(output)
    scalars = {str(k): v for k, v in named if isinstance(v, Tensor) and v.ndim == 0 and v.requires_grad}
    if wanted in scalars:
        return scalars[wanted]
    if "loss" in scalars:
        return scalars["loss"]
    if wanted == "auto" and len(scalars) == 1:
        return next(iter(scalars.values()))
    what = f"no output of the model is the loss {wanted!r} (scalars with a gradient: {', '.join(scalars) or 'none'})"
    raise PlanError(what, where="loss", fix="set loss: {output: NAME}")


class NoDropout(TorchFunctionMode):
    """Makes each dropout the identity, in attention too, while it is entered."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        place = _PLACES.get(func)
        if place is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in named:
                named["dropout_p"] = 0.0
        return func(*args, **named)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences: ``loss`` and ``gradient`` relative, ``parameter`` absolute after ``num_updates`` updates.

    A loss below ``small_loss`` may differ as much as that one. ``rounding`` of a parameter is added to ``parameter``.
    """

    dtype: torch.dtype
    loss: float
    gradient: float
    parameter: float
    num_updates: int = 1
    small_loss: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, lr: float, asked: float | None = None, *, num_updates: int = 1) -> Tolerance:
        """Return the tolerance of a model with lowest precision ``dtype``. ``asked``: of loss and gradients instead."""
        table = {torch.float64: (1e-10, 1e-8, 1e-4), torch.float32: (2e-6, 5e-5, 0.2)}
        # AdamW moves an element by about lr whatever the size of its gradient: a wrong sign moves it 2·lr an update
        loss, gradient, updates = table.get(dtype, (2e-2, 1e-1, 2.0 * num_updates))
        small = SMALL_LOSS if asked is None and dtype not in table else 0.0
        loss, gradient = (loss, gradient) if asked is None else (asked, asked)
        return cls(dtype, loss, gradient, updates * lr, num_updates, small)

    def of_loss(self, loss: float) -> float:
        """Return the allowed relative difference of this loss."""
        return self.loss * max(1.0, self.small_loss / max(abs(loss), 1e-300))

    def rounding(self, truth: Tensor) -> Tensor:
        """Return the allowed rounding of each element of a parameter: up to eps·|x| for each update.

        In bfloat16 this is more than the update itself. One process rounds at each update; the engine updates float32
        main weights and rounds once. |x| is as large as the tolerance allows the engine's parameter to be.
        """
        largest = truth.detach().double().abs() + self.parameter
        return largest * (torch.finfo(truth.dtype).eps * self.num_updates)

    def gradient_floor(self, largest: float) -> float:
        """Return the size below which a gradient is rounding noise of the model's ``largest`` (as of a key's bias)."""
        return NOISE * torch.finfo(self.dtype).eps * largest / self.gradient if self.gradient else 0.0
