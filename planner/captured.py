"""A model, captured once: each plan begins with its own copy of the captured graph.

    capture_model(model, spec, inputs) → Captured     the graph of one microbatch
    prepare(captured, spec) → Prepared                a copy, with the random numbers, loss and norms of the spec

A capture depends on the inputs of one microbatch, on ``loss`` and ``precision.parameters``: no other key of the spec.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from passes.canonical.masks import simplify_masks
from passes.canonical.norms import fuse_norms
from passes.dropout import name_draws
from passes.errors import PlanError
from passes.lowering import NO_DOCUMENTS, Documents, find_documents
from passes.partition.batch.align_exports import wider
from passes.partition.batch.id_ranges import check_fixed_lookups
from passes.partition.loss.shares import LossTerms, share_loss
from passes.program.program import Program, copied
from planner.capture.eager_trials import refuse_another_forward
from planner.capture.export import capture
from planner.capture.forms import Forms
from planner.capture.inferred_rules import infer_rules
from planner.capture.model.eager import uncompiled, unwrapped
from planner.capture.model_fingerprint import ModelState
from planner.capture.own_loss import apply_loss, loss_function
from planner.capture.resized import Earlier
from planner.documents import check_documents, kept_apart
from planner.files.named_code import is_named
from planner.progress import shown_if_slow
from planner.spec.fields import AUTO
from planner.spec.sections import GLOBAL
from planner.spec.spec import Spec
from planner.updates import UpdateRules, decide_rules

_AGAIN = "call capture(model, spec) with this spec"


@dataclass(eq=False, repr=False)
class Captured:
    """A captured model, made by ``planner.capture``. ``planner.plan`` takes it in place of the model, for many specs.

    It holds the model with its weights, which stay in memory as long as you keep it. ``loss``: the name in the spec.
    ``dtype``: floating parameters and inputs are cast to it; None keeps the model's own. ``seconds``: duration of the
    capture.
    """

    given: nn.Module
    loss: str
    dtype: torch.dtype | None
    seconds: float
    example: dict[str, Tensor]  # the inputs that it was captured with
    _programs: dict[int, Program]  # size of the batch in microbatches → its program, which is never rewritten
    _state: ModelState | None = field(default=None)
    _function: Callable[..., Any] | None = field(default=None)
    earlier: Earlier = field(default_factory=Earlier)  # captures of the model at other sizes
    forms: Forms = ()  # of the inputs that the model takes in other forms than rows
    apart: dict[Any, bool] = field(default_factory=dict)  # see ``_keeps_apart``

    @property
    def model(self) -> nn.Module:
        """The model as its user wrote it: without wrappers of torch.compile."""
        return uncompiled(self.given)

    @cached_property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Batch key → shape of one microbatch [b, …] and dtype."""
        return {name: (tuple(value.shape), value.dtype) for name, value in self.example.items()}

    @property
    def micro(self) -> int:
        """Sequences of the microbatch."""
        return next(iter(self.example.values())).shape[0]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sequences of each captured batch: a second one if the loss's dependence on the batch was unclear."""
        return tuple(self.micro * times for times in self._programs)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name} {_text(value)}" for name, value in self.example.items())
        dtype = "" if self.dtype is None else f", as {_name(self.dtype)}"
        loss = "" if self.loss == AUTO else f", loss {self.loss}"
        return f"Captured({type(self.model).__name__} of {inputs}{dtype}{loss}, {self.seconds:.1f} s)"

    def example_for(self, spec: Spec) -> dict[str, Tensor] | None:
        """The inputs that it was captured with, if ``spec`` names none."""
        return None if spec.inputs else self.example

    def program(self, times: int = 1) -> Program:
        """A copy of the captured program, of ``times`` as many sequences. Raises PlanError as capturing does."""
        if times not in self._programs:
            with shown_if_slow("capturing the model at another batch size"):
                self._programs[times] = self._of(wider(self.example, times))
        return copied(self._programs[times])

    def program_at(self, inputs: Mapping[str, Tensor]) -> Program:
        """Of ``inputs`` of another length, or of its own if the model cannot be captured at them."""
        try:
            return self.program() if inputs is self.example else self._of(inputs)
        except PlanError:
            return self.program()

    def _of(self, inputs: Mapping[str, Tensor]) -> Program:
        module, loss = apply_loss(self.model, self.loss, self.forms)
        return capture(module, inputs, loss=loss, dtype=self.dtype, is_known=True, earlier=self.earlier)

    def remember_model(self) -> None:
        """Note how the model is now, for ``check_model``."""
        self._state, self._function = ModelState(self.model), loss_function(self.loss)

    def check_model(self) -> None:
        """Raise PlanError if the model has changed since the capture."""
        if self._state is None:
            return
        if (changed := ModelState(self.model).difference(self._state)) is not None:
            raise PlanError(f"the model has changed since it was captured: {changed}", fix="capture the model again")
        if loss_function(self.loss) is not self._function:
            what = f"the loss function {self.loss} has changed since the model was captured"
            raise PlanError(what, where="loss", fix="capture the model again")
        if self.dtype is None:  # weights may be others: the check that reads their values is made again
            module = apply_loss(self.model, self.loss, self.forms)[0]
            refuse_another_forward(module, self.example, self._programs[1])

    def check_spec(self, spec: Spec, inputs: Mapping[str, Tensor]) -> None:
        """Raise PlanError if ``spec``, with microbatches like ``inputs``, needs another capture."""
        if list(inputs) != list(self.example):
            asked, seen = ", ".join(inputs), ", ".join(self.example)
            raise PlanError(
                f"the model was captured with inputs {seen}; the spec has {asked}", where="inputs", fix=_AGAIN
            )
        for name, value in self.example.items():
            self._check_input(name, inputs[name], value)
        if spec.inputs and spec.forms != self.forms:
            what = "the model was captured with inputs of other values, or joined in another way"
            raise PlanError(what, where="inputs", fix=_AGAIN)
        if spec.loss != self.loss:
            what = f"the model was captured with loss: {_loss(self.loss)}; the spec has {_loss(spec.loss)}"
            raise PlanError(what, where="loss", fix=f"{_AGAIN}, or set loss: {_loss(self.loss)}")
        if dtype_of(spec) != self.dtype:
            asked, seen = _name(dtype_of(spec)), _name(self.dtype)
            what = f"the model was captured with parameters in {seen}; the spec has {asked}"
            fix = f"{_AGAIN}, or set precision.parameters: {'null' if self.dtype is None else seen}"
            raise PlanError(what, where="precision.parameters", fix=fix)

    def _check_input(self, name: str, asked: Tensor, seen: Tensor) -> None:
        if (asked.shape, asked.stride(), asked.dtype) == (seen.shape, seen.stride(), seen.dtype):
            return
        what = f"the model was captured with {name} {_text(seen)}; the spec has {_text(asked)}"
        if asked.shape[1:] == seen.shape[1:] and asked.shape[0] != seen.shape[0]:
            raise PlanError(what, where="batch.micro", fix=f"{_AGAIN}, or set batch.micro: {seen.shape[0]}")
        raise PlanError(what, where=f"inputs.{name}", fix=_AGAIN)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program for one plan to rewrite. Its loss is the share of one microbatch; ``terms`` has the denominators.

    ``rules``: of the update; ``documents``: the attentions that run within documents.
    """

    program: Program
    terms: LossTerms
    rules: UpdateRules
    documents: Documents = NO_DOCUMENTS


def capture_model(
    model: nn.Module, spec: Spec, inputs: Mapping[str, Tensor], earlier: Earlier | None = None
) -> Captured:
    """``model``, captured for ``inputs``: one microbatch, on any device. ``earlier``: captures at other sizes. Raises
    PlanError."""
    start, earlier = time.perf_counter(), earlier or Earlier()
    with shown_if_slow("capturing the model"):
        module, loss = apply_loss(uncompiled(model), spec.loss, spec.forms)
        program = capture(module, inputs, loss=loss, dtype=dtype_of(spec), earlier=earlier)
    seconds = time.perf_counter() - start
    kept = dict(inputs), {1: program}
    return Captured(unwrapped(model), spec.loss, dtype_of(spec), seconds, *kept, earlier=earlier, forms=spec.forms)


def prepare(captured: Captured, spec: Spec, *, on_gpu: bool = False) -> Prepared:
    """The canonical program of ``captured`` as ``spec`` asks for it, on a cluster of GPUs or not. Raises PlanError."""
    changes = spec.data.packing == "documents" and _keeps_apart(captured, spec.data.inputs)

    def program_of(times: int = 1) -> Program:
        program = captured.program(times)
        if changes:
            kept_apart(program, spec.data.inputs)
        return program

    program = program_of()
    if spec.tensor_parallel.infer_rules:
        with shown_if_slow("running ops without a rule on random values"):
            infer_rules(program)
    simplify_masks(program)
    check_fixed_lookups(program)
    if spec.dropout == "layout_invariant":
        name_draws(program, int(spec.batch.micro))
    num_microbatches = spec.batch.global_size // int(spec.batch.micro)
    is_whole = spec.batch.statistics == GLOBAL or spec.num_microbatches == 1
    terms = share_loss(program, num_microbatches, program_of, in_turn=spec.num_microbatches if is_whole else 0)
    if spec.fuses_norms(on_gpu=on_gpu):
        fuse_norms(program)
    documents = find_documents(program, spec.telling_inputs, spec.data.mean_document)
    return Prepared(program, terms, decide_rules(spec.optimizer, program), documents)


def _keeps_apart(captured: Captured, given: Mapping[str, str]) -> bool:
    """Whether ``kept_apart`` must change the program; ``given``: the spec's ``data.inputs``.

    Raises PlanError for a model that mixes documents otherwise.
    """
    asked = frozenset(given.items())
    if asked not in captured.apart:
        with shown_if_slow("looking for ops that read tokens of other documents"):
            captured.apart[asked] = check_documents(captured.model, captured.example, given, captured.program_at)
    return captured.apart[asked]


def inputs_of(spec: Spec, example_inputs: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """One microbatch of every input: the caller's example, or tensors without memory. Raises PlanError."""
    return _made(spec) if example_inputs is None else _checked(spec, example_inputs)


def _made(spec: Spec) -> dict[str, Tensor]:
    return {
        name: torch.empty((int(spec.batch.micro), *given.sizes), dtype=getattr(torch, given.dtype), device="meta")
        for name, given in spec.require_inputs().items()
    }


def _checked(spec: Spec, example_inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The caller's example in rows, if it is one microbatch."""
    example_inputs = spec.in_rows(example_inputs)
    for name, value in example_inputs.items():
        if not isinstance(value, Tensor):
            raise PlanError(
                f"example_inputs[{name!r}] is a {type(value).__name__}",
                where="plan(…, example_inputs)",
                fix="pass tensors, on any device",
            )
        if value.dim() == 0 or value.shape[0] != spec.batch.micro:
            raise PlanError(
                f"example_inputs[{name!r}] has shape {list(value.shape)}, a microbatch {spec.batch.micro} rows",
                where="batch.micro",
                fix=f"give {spec.batch.micro} rows for each input, or set batch.micro",
            )
    return dict(example_inputs)


def dtype_of(spec: Spec) -> torch.dtype | None:
    """Of the parameters, None for the model's own."""
    return None if spec.precision.parameters is None else getattr(torch, spec.precision.parameters)


def _loss(name: str) -> str:
    """As a spec says it."""
    return name if name == AUTO or is_named(name) else f"{{output: {name}}}"


def _name(dtype: torch.dtype | None) -> str:
    return "the model's own dtype" if dtype is None else str(dtype).removeprefix("torch.")


def _text(value: Tensor) -> str:
    strides = "" if value.is_contiguous() else f" with strides {list(value.stride())}"
    return f"{list(value.shape)} {_name(value.dtype)}{strides}"
