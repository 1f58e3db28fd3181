"""Watches the model's forward while export runs it: what it computes with, what it leaves behind, what it returns.

Two forward hooks of the caller's model, taken off again: the first thing before its forward and the last after it. In
between are watched tensors that are none of the model's (capture.model.held_tensors), Python's random numbers and
clocks (planner.capture.python.draws), and what the model keeps in Python (planner.capture.python.state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from planner.capture.known_values import node_of, value_of
from planner.capture.model.exchange import Exchange, fake
from planner.capture.model.held_tensors import ForeignTensors
from planner.capture.outputs import plain_structure
from planner.capture.python.draws import PythonDraws
from planner.capture.python.state import Change, PythonState, is_doubtful, move_on
from planner.capture.same_forward import first_difference
from planner.errors import PlanError, Where
from planner.graph.constants import is_made_of
from planner.graph.source_lines import where_of

STATE_FIX = (
    "a plan holds for every step: give what changes from step to step as an input of the forward, or compute it outside"
)


class ForwardWatch:
    """Owns the picture of the model's Python side before its forward. ``notes``: what a user should know."""

    def __init__(self, model: nn.Module, exchange: Exchange, mode: FakeTensorMode) -> None:
        self.notes: list[str] = []
        self._model, self._exchange, self._mode = model, exchange, mode
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._fixed = {**dict(model.named_buffers()), **frozen}
        self._foreign = ForeignTensors(model, exchange)
        self._draws = PythonDraws(model)
        self._state: PythonState | None = None
        self._changes: list[Change] = []
        # tensors that the forward left, made of constants, buffers and frozen parameters, and their values where known
        self._constant: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._running = ExitStack()

    def check(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> None:
        """What each torch function is given."""
        self._foreign.check(args, kwargs)
        self._draws.seeds.check(args, kwargs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around all exports; afterwards the model is as it was before its first forward."""
        before = self._model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        after = self._model.register_forward_hook(self._after, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._stop()
            if self._state is not None:
                self._state.restore()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stop()
        if self._state is None:
            self._state = PythonState(self._model)
        self._running = ExitStack()
        self._running.enter_context(self._draws.watched())
        self._foreign.is_running = True

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._stop()
        if self._state is not None and not self._changes:
            self._changes = self._state.changes()
            self._constant = {id(t): (t, value) for t, value in self._constants()}
        return plain_structure(output)

    def _stop(self) -> None:
        self._foreign.is_running = False
        self._running.close()

    # ---- what the forward left behind

    @property
    def doubts(self) -> bool:
        """Whether a next forward may not compute what this one did."""
        return bool(self._doubtful or self._draws.clocks)

    @property
    def _doubtful(self) -> list[Change]:
        return [change for change in self._changes if is_doubtful(change, self._is_constant)]

    def _is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self._constant

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The model as it was before its first forward."""
        assert self._state is not None
        self._state.restore()
        yield

    @contextmanager
    def moved_on(self) -> Iterator[None]:
        """The model as many forwards later: the hooks that the first has installed stay."""
        assert self._state is not None
        self._state.restore(with_hooks=False)
        move_on(self._changes, self._later)
        yield

    def _later(self, tensor: Tensor) -> Tensor | None:
        """What stands where the forward left ``tensor`` when a later one comes; None for what stood there before."""
        if self._is_constant(tensor):
            return self._constant[id(tensor)][1]
        return fake(tensor, None, self._mode)

    def settle(self, exported: torch.export.ExportedProgram, again: Callable[[], Any]) -> None:
        """Raise PlanError unless ``again`` exports the same graph."""
        clocks = list(dict.fromkeys(self._draws.clocks))
        try:
            differing = first_difference(exported, again(), self._fixed_values())
        except PlanError as error:
            raise self._depends(error.where if isinstance(error.where, Where) else Where(), clocks) from error
        if differing is not None:
            raise self._depends(where_of(differing), clocks)
        asked = "the forward asks for the time at {}: nothing that it computed depended on the answer"
        self.notes += [asked.format(where) for where in clocks]

    def _constants(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Of what the forward left, the tensors made of what does not change, while the tracer knows them."""
        mode = proxy_tensor.get_proxy_mode()
        tensors = {id(t): t for change in self._changes for t in _tensors(change.after)}.values()
        if mode is None or not tensors:
            return
        values = self._fixed_values()  # export puts tensors of its own in their place
        named = (*self._model.named_buffers(), *self._model.named_parameters())
        fixed = {node_of(t, mode.tracer): values[name] for name, t in named if name in values}
        known = {node: value for node, value in fixed.items() if node and not value.is_meta}
        for tensor in tensors:
            node = node_of(tensor, mode.tracer)
            if node is None:
                yield tensor, tensor if not isinstance(tensor, FakeTensor) else None
            elif is_made_of(node, set(fixed)):
                with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
                    yield tensor, value_of(node, mode.tracer.root, known)

    def _fixed_values(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters by name: their values, which the exchange has put aside."""
        return {name: self._exchange.values(tensor) for name, tensor in self._fixed.items()}

    def _depends(self, where: Where, clocks: list[Where]) -> PlanError:
        changed = self._doubtful
        if not changed:
            return PlanError(
                "the forward computes with the time of day: a plan would keep that of the capture",
                where=clocks[0],
                fix=STATE_FIX,
            )
        names = ", ".join(dict.fromkeys(change.what for change in changed[:3]))
        line = next((w for w in (change.where for change in changed) if w.line), where)
        return PlanError(
            f"the forward depends on what earlier calls left in Python ({names}): a plan would keep that",
            where=line,
            fix=STATE_FIX,
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
