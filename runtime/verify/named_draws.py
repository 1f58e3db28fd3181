"""Layout-invariant random numbers: with ``dropout: layout_invariant``, one process draws the masks of every layout.

    names      of the draws of the model, captured at the size of the global batch: site, sample, element
    forward    of the user's model, op by op: PyTorch's numbers are replaced by those of the next name

Draws that the loss does not read have no name, and keep PyTorch's numbers: they have other source lines or shapes.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from passes.canonical.masks import simplify_masks
from passes.dropout import BERNOULLI, KINDS, NORMAL, UNIFORM, name_draws
from passes.errors import PlanError, Where
from passes.interceptors import installed
from passes.ops.dropout import SampleElements, counted_bernoulli, counted_dropout, counted_normal, counted_uniform
from passes.ops.random_state import RandomState
from passes.program.ops.aten import aten
from passes.program.source_lines import frames_of, where_of
from passes.types.types import Draw
from planner.capture.export import capture
from planner.capture.own_loss import apply_loss
from planner.capture.user_lines import CallSites
from planner.spec.spec import Spec

DROPOUT = "dropout"
Shapes = tuple[tuple[int, ...], ...]  # of the inputs of a batch, in their order
_IN_PLACE = {aten.bernoulli_.float: (DROPOUT, BERNOULLI), aten.bernoulli_.Tensor: (BERNOULLI,)}  # in-place draws
_FIX = "write dropout: fast to verify the plan without dropout"


@dataclass(frozen=True, slots=True)
class Named:
    """The draw of one op in the forward of the global batch. ``p``: of a dropout, else 0. ``frames``: the user's (file,
    line) in its call stack."""

    kind: str
    place: SampleElements
    p: float
    where: Where
    frames: tuple[tuple[str, int], ...] = ()


def draws_of(model: nn.Module, spec: Spec) -> tuple[Named, ...]:
    """Return the draws of one forward over the global batch, in order; a dropout with p = 1 draws nothing."""
    size = spec.batch.global_size
    inputs = {
        name: torch.empty((size, *field.sizes), dtype=getattr(torch, field.dtype), device="meta")
        for name, field in spec.require_inputs().items()
    }
    dtype = None if spec.precision.parameters is None else getattr(torch, spec.precision.parameters)
    module, loss = apply_loss(model, spec.loss, spec.forms)
    program = capture(module, inputs, loss=loss, dtype=dtype)
    simplify_masks(program)
    name_draws(program, size)
    draws = [_named(node) for node in program.graph.graph.nodes if "draw" in node.meta]
    return tuple(sorted((named for named in draws if named.p < 1.0), key=lambda named: named.place.site))


def draws_of_lengths(model: nn.Module, spec: Spec) -> dict[Shapes, tuple[Named, ...]]:
    """Return shapes of the global batch → draws, for each length."""
    draws = {}
    for place in range(max(1, len(spec.lengths))):
        of_length = spec.at(place)
        size, inputs = of_length.batch.global_size, of_length.require_inputs()
        draws[tuple((size, *field.sizes) for field in inputs.values())] = draws_of(model, of_length)
    return draws


def _named(node: fx.Node) -> Named:
    draw: Draw = node.meta["draw"]
    whole = tuple(((0, size),) for size in draw.shape)
    is_dropout = node.target is aten.dropout.default
    p: Any = node.args[1] if is_dropout else 0.0
    kind = DROPOUT if is_dropout else KINDS[node.target]
    return Named(
        kind,
        SampleElements(draw.site, draw.shape, whole, draw.batch, draw.by_sample),
        p,
        where_of(node),
        frames_of(node),
    )


class NamedDraws(TorchDispatchMode):
    """Replaces PyTorch's random numbers by those of the ``draws`` of the batch's shapes, in order."""

    def __init__(self, model: nn.Module, draws: Mapping[Shapes, Sequence[Named]], seed: int) -> None:
        super().__init__()
        self.draws, self._sites = dict(draws), CallSites(model)
        self._random = RandomState(seed, tp_rank=0)
        self._left: deque[Named] = deque()
        self._is_forward = True

    @contextmanager
    def forward(self, step: int, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the numbers of a forward of the global ``batch``. Raises PlanError if a draw is missing."""
        self._random.begin(step, 0)
        self._left.extend(self.draws[tuple(tuple(value.shape) for value in batch.values())])
        with self:
            yield
        if self._left:
            first = self._left[0]
            self._left.clear()
            raise PlanError(
                f"one process does not draw the captured random numbers: {first.kind} of {list(first.place.shape)} is "
                "missing",
                where=first.where,
                fix=_FIX,
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Raise PlanError if the backward draws: its draws cannot be mapped to those of the forward."""
        with installed((self, "_is_forward", False)), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            if not self._is_forward:
                raise PlanError(
                    f"one process draws random numbers in its backward ({func}), as torch.utils.checkpoint "
                    "does, which cannot be mapped",
                    where=self._sites.here(),
                    fix=f"turn off checkpointing in the model, or {_FIX}",
                )
            # the captured frames must be in the call stack in order; frames that a capture lacks may be between them
            here = iter(self._sites.frames_here())
            is_next = self._left and _fits(self._left[0], func, out, args)
            if is_next and all(frame in here for frame in self._left[0].frames):
                out.copy_(self._values(self._left.popleft(), out, args))
        return out

    def _values(self, named: Named, out: Tensor, args: Any) -> Tensor:
        random, place = self._random, named.place
        if named.kind == DROPOUT:
            return counted_dropout(torch.ones_like(out), named.p, random, place) != 0
        if named.kind == BERNOULLI:
            return counted_bernoulli(args[1] if len(args) > 1 else args[0], random, place, out)
        counted = {UNIFORM: counted_uniform, NORMAL: counted_normal}[named.kind]
        return counted(random, place, out.dtype, out.device)


def _fits(named: Named, func: Any, out: Tensor, args: Any) -> bool:
    """Return whether this op can be the draw ``named``, by its kind, shape and probability."""
    kinds = _IN_PLACE.get(func) or (KINDS.get(func),)
    is_dropout = named.kind == DROPOUT
    return (
        named.kind in kinds
        and tuple(out.shape) == named.place.shape
        and (not is_dropout or abs(args[1] - (1.0 - named.p)) < 1e-12)
    )
