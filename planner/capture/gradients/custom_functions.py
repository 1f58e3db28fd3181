"""Decide the form of each custom Function that a forward applies, during its export.

    its backward is the derivative of its forward    the ops of its forward, as torch.export records them
    anything else                                    one call with its own backward (passes.program.ops.own_backward)

A Function of the second kind runs on every rank as the user wrote it, so it may depend only on its arguments: one that
writes into them, or reads other tensors of the model, is refused at its line.

Trials run on another thread, without the modes of the export.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import PlanError
from passes.program.ops.own_backward import Autocast, Facts, Operand, Output, OwnBackward
from planner.capture.gradients.applications import (
    MEMORY_FIX,
    READS_MEMORY,
    SAMPLES,
    TOO_MANY_ELEMENTS,
    Application,
    Shape,
    draw,
    is_plain,
    on_the_side,
)
from planner.capture.gradients.regions import autocast_now
from planner.capture.gradients.trials import FollowsMemory, RandomBackward, facts_of, is_derived
from planner.capture.model.eager import outside_of_the_trace
from planner.capture.model.exchange import tensors_in

WRITTEN_FIX = "compute a new tensor in the forward (`x * 2` instead of `x.mul_(2)`)"
HIDDEN_FIX = "pass every tensor that the Function reads as an argument of apply, and return its gradient"


class CustomFunctions:
    """Owns the decisions for the Functions of one model, in all its exports; equal uses are tried once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.model = nn.Module()  # the model under export
        self._derived: dict[Any, bool | None] = {}
        self._facts: dict[Any, Facts] = {}
        self._calls: dict[Any, OwnBackward] = {}
        self._met: list[object] = []  # arguments without a plain value, numbered in labels by order of appearance
        self._kept: list[Application] = []  # their arguments live on, so that no id is given twice

    def kept_as_call(self, use: Application, args: tuple[Any, ...]) -> OwnBackward | None:
        """Return the call with its own backward that replaces this use; None if the ops of its forward replace it."""
        key = use.key()
        if key not in self._derived:
            self._kept.append(use)
            self._derived[key] = outside_of_the_trace(lambda: is_derived(use))
        if self._derived[key]:
            return None
        autocast = autocast_now()
        place = (key, tuple(t.stride() for t in tensors_in(args)), autocast)
        if place not in self._calls:
            self._calls[place] = self._call(use, args, autocast)
        return self._calls[place]

    def _call(self, use: Application, args: tuple[Any, ...], autocast: Autocast | None) -> OwnBackward:
        outputs = outside_of_the_trace(lambda: _Look(self.model, use, args, autocast).outputs())
        key = use.key()
        if key not in self._facts:
            self._facts[key] = self._tried(use)
        operands = use.given([Operand(i) for i in range(len(use.shapes))])
        label = self._label(use, autocast)
        return OwnBackward(
            use.function, operands, outputs, self._facts[key], label, autocast, f"{len(self._calls)} {label}"
        )

    def _tried(self, use: Application) -> Facts:
        try:
            facts = outside_of_the_trace(lambda: facts_of(use))
        except RandomBackward:
            raise PlanError(
                f"the backward of {use.name} draws random numbers, which differ between layouts",
                where=use.where,
                fix="draw them in the forward, and save them for the backward",
            ) from None
        except FollowsMemory:
            raise PlanError(f"{use.name} {READS_MEMORY}", where=use.where, fix=MEMORY_FIX) from None
        top = {id(a) for a in use.args if isinstance(a, Shape)}  # autograd sees no tensor within a list
        reached = tuple(r and id(s) in top for r, s in zip(facts.reached, use.shapes, strict=True))
        if not facts.tried:
            self.notes.append(
                f"{use.name} at {use.where} does not run by itself on random values: it is replicated on every "
                "rank, and its backward could not be tested"
            )
        return replace(facts, reached=reached)

    def _label(self, use: Application, autocast: Autocast | None) -> str:
        """Return the function and its arguments as text, the same in every process."""
        shown = [self._shown(leaf) for leaf in pytree.tree_leaves(use.args)]
        mode = f" under autocast {autocast}" if autocast else ""
        return f"{self._numbered(use.function, use.name)}({', '.join(shown)}){mode}"

    def _shown(self, leaf: object) -> str:
        if isinstance(leaf, Shape):
            return "_"
        return repr(leaf) if is_plain(leaf) else self._numbered(leaf, type(leaf).__name__)

    def _numbered(self, thing: object, name: str) -> str:
        if not any(thing is met for met in self._met):
            self._met.append(thing)
        alike = [m for m in self._met if getattr(m, "__qualname__", type(m).__name__).endswith(name)]
        number = next(i for i, m in enumerate(alike) if m is thing)
        return f"{name}#{number + 1}" if number else name


class _Look:
    """Runs a Function once on tensors without values, to find its outputs, reads and writes."""

    def __init__(self, model: nn.Module, use: Application, args: tuple[Any, ...], autocast: Autocast | None) -> None:
        self.model, self.use, self.args, self.autocast = model, use, args, autocast
        self.mode = detect_fake_mode(tensors_in(args))

    def outputs(self) -> Any:
        """Return the result of apply, with Outputs in place of tensors."""
        try:
            return self._on_fakes()
        except PlanError:
            raise
        except Exception as error:  # it reads values: NumPy, or a branch
            if self.use.num_elements > TOO_MANY_ELEMENTS:
                raise self._refused(f"{self.use.name} does not run on tensors without values: {error}", "") from error
        try:
            with on_the_side():
                return self._run(draw(self.use, SAMPLES[0]))
        except PlanError:
            raise
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self._refused(
                f"{self.use.name} has its own backward, and does not run by itself: {why}", HIDDEN_FIX
            ) from error

    def _on_fakes(self) -> Any:
        with self.mode or nullcontext(), _Reads() as reads:
            values = [
                torch.empty_strided(s.sizes, t.stride(), dtype=s.dtype, device="cpu")
                for s, t in zip(self.use.shapes, tensors_in(self.args), strict=True)
            ]
            try:
                return self._run(values, reads)
            finally:
                self._refuse_hidden(reads)

    def _run(self, values: list[Tensor], reads: _Reads | None = None) -> Any:
        leaves = [v.requires_grad_() if s.requires_grad else v for s, v in zip(self.use.shapes, values, strict=True)]
        given = [v.clone() if v.requires_grad else v for v in leaves]  # a leaf could not be written into
        versions = [v._version for v in given]
        with torch.enable_grad(), self.autocast.entered() if self.autocast else nullcontext():
            result = self.use.function.apply(*self.use.given(given))
        if versions != [v._version for v in given]:
            raise self._refused(f"{self.use.name} has its own backward and writes into its arguments", WRITTEN_FIX)
        if reads is not None:
            self._backward(result, leaves)
        return pytree.tree_map_only(Tensor, _output, result)

    def _backward(self, result: Any, leaves: list[Tensor]) -> None:
        """Run the backward, only to find its reads; one that reads values fails here, and is not an error."""
        reached = [o for o in tensors_in(result) if o.requires_grad]
        asked = [v for v in leaves if v.requires_grad]
        if reached and asked:
            try:
                torch.autograd.grad(reached, asked, [torch.ones_like(o) for o in reached], allow_unused=True)
            except PlanError:
                raise
            except Exception:
                return

    def _refuse_hidden(self, reads: _Reads) -> None:
        if not reads.unknown:
            return
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        name = next((f"{n} of the model" for n, p in named for t in reads.unknown if p is t), "a tensor of the model")
        raise self._refused(
            f"{self.use.name} has its own backward and reads {name}, which is not among its arguments", HIDDEN_FIX
        )

    def _refused(self, what: str, fix: str) -> PlanError:
        return PlanError(what, where=self.use.where, fix=fix or HIDDEN_FIX)


class _Reads(TorchDispatchMode):
    """Notes tensors without values that were not made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: list[Tensor] = []
        self._made: list[Tensor] = []
        self._ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor) and id(tensor) not in self._ids:
                self.unknown.append(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._made.append(tensor)
            self._ids.add(id(tensor))
        return result


def _output(tensor: Tensor) -> Output:
    sizes, strides = tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride())
    return Output(sizes, strides, tensor.dtype, tensor.requires_grad)
