"""Watches the model's forward while export runs it: its inputs, the state that it leaves, its results.

Wraps the call of the caller's model without a hook, which the model could count: begins before its own hooks and ends
after them. Watches tensors that are not the model's (planner.capture.model.held_tensors), random numbers and clocks
(planner.capture.python.draws), and the model's Python state (planner.capture.python.state).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from passes.errors import PlanError, Where
from passes.interceptors import installed
from passes.program.known_values import is_made_of, node_of, value_of
from passes.program.source_lines import where_of
from planner.capture.graphs_equal import first_difference, fixed_tensors
from planner.capture.model.exchange import Exchange, fake, tensors_in
from planner.capture.model.held_tensors import ForeignTensors
from planner.capture.outputs import plain_structure
from planner.capture.python.calls import ForwardCall, Keys, tensors_with_memory
from planner.capture.python.draws import FIX as DRAW_FIX
from planner.capture.python.draws import CertainDraws, PythonDraws
from planner.capture.python.modules import CachedFunctions, refuse_frozen
from planner.capture.python.state import FAR, MORE, NEAR, Change, PythonState, is_doubtful, move_on
from planner.capture.recording import FurtherCall
from planner.capture.user_lines import line_that_changes

STATE_FIX = "a plan is the same for every step: pass changing values as inputs of the forward, or compute them outside"


class ForwardWatch:
    """Watches all forwards of one capture, with ``kwargs``; owns the snapshot of Python state before the first one.
    ``remarks``: for the user, with lines.
    """

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Any], exchange: Exchange, mode: FakeTensorMode) -> None:
        self.remarks: list[tuple[str, Where]] = []
        self._model, self._kwargs, self._exchange, self._mode = model, kwargs, exchange, mode
        self._fixed = fixed_tensors(model)
        self._foreign = ForeignTensors(model, exchange)
        self._draws = PythonDraws(model)
        self._cached = CachedFunctions(model)
        self._state: PythonState | None = None
        self._changes: list[Change] = []
        # tensors that the forward left, made of constants, buffers and frozen parameters, and their values if known
        self._constant: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._keys, self._calls, self._records, self._is_running = Keys(), list[ForwardCall](), True, False

    def check(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> None:
        if self._is_running:
            self._foreign.check(args, kwargs)
            self._draws.check(kwargs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all exports inside; afterwards the model is in its state before the first forward."""
        call = nn.Module._call_impl

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # export passes a stand-in where modules are shared; a model with a loss of its own calls the model inside
            if vars(module) is not vars(self._model) or self._is_running:
                return call(module, *args, **kwargs)
            with self._watching():
                output = self._recorded(lambda: call(module, *args, **kwargs), args, kwargs)
                self._refuse_frozen()
            return plain_structure(output)

        try:
            with installed((nn.Module, "_call_impl", watched)):
                yield
        finally:
            self._cached.forget()
            if self._state is not None:
                self._state.restore()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch one forward; afterwards the state that the first one changed is known."""
        self._cached.forget()
        if self._state is None:
            self._state = PythonState(self._model)
        try:
            with self._draws.watched(), installed((self, "_is_running", True)):
                yield
        finally:
            if not self._changes and len(self._calls) < 2:
                self._changes = self._state.changes()
                self._constant = {id(t): (t, value) for t, value in self._constants()}

    def _recorded(self, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        if not self._records:
            return call()
        self._keys.begin(self._model, args, kwargs)
        with ForwardCall(self._keys, tensors_with_memory((args, kwargs))) as recorded:
            output = call()
            recorded.end(output)
        self._calls.append(recorded)
        return output

    def call_again(self) -> None:
        """Make further calls, without export. One that asks for values ends this; if none ends, those in export's modes
        do not count: the modes alone may make the difference, as if peft registers a parametrization in the forward.
        """
        before = len(self._calls)
        for _ in range(2 if self._calls else 0):
            self._call()
        if len(self._calls) == before:
            self.forget_calls()
        if self._unlike(self._calls[1:]) is not None:  # export may have undone the changes of the first one
            self._call()
        self._records = False

    def calls_alike(self, calls: Iterable[FurtherCall]) -> bool:
        """Make ``calls``; return whether all ended, and computed the same as earlier ones."""
        for call in calls:
            self._run(call)
            if not call.has_ended or self.unlike is not None:
                return False
        self._records = False
        return True

    def widens(self, call: FurtherCall, kwargs: Mapping[str, Any]) -> bool:
        """Return whether ``call`` with ``kwargs``, of more sequences, does to them what the last call did to one."""
        with installed((self, "_keys", Keys()), (self, "_records", True)):
            self._run(call, kwargs)
        return call.has_ended and self._calls.pop().widens(self._calls[-1])

    def forget_calls(self) -> None:
        """Forget all calls but the first."""
        del self._calls[1:]

    def run(self, call: FurtherCall) -> None:
        """Make ``call``, which may not end, and is not compared with others."""
        self._records = False
        self._run(call)

    def _run(self, call: FurtherCall, kwargs: Mapping[str, Any] | None = None) -> None:
        with suppress(Exception), CertainDraws(self.check), call.running() as end:
            end(self._model(**(self._kwargs if kwargs is None else kwargs)))

    @property
    def left_nothing(self) -> bool:
        """Return whether all calls computed the same, and left no state that a next one could read."""
        return bool(self._calls) and not self._changes and not self.doubts and self.unlike is None and not self.remarks

    def _call(self) -> None:
        with suppress(Exception), CertainDraws(self.check), self._mode:
            self._model(**self._kwargs)

    @property
    def unlike(self) -> Where | None:
        """Return the line at which a further call went another way than the first; None if none did."""
        return self._unlike(self._calls)

    def _unlike(self, calls: list[ForwardCall]) -> Where | None:
        for call in calls[1:]:
            if call.outputs != calls[0].outputs:
                return call.first_other(calls[0])
        return None

    @property
    def is_unknown(self) -> bool:
        """Return whether calls differ by state that no attribute shows, and that cannot be restored."""
        return self.unlike is not None and not self._changes

    def refuse_draws(self) -> None:
        """Raise PlanError if a random generator that the model holds has moved."""
        for change in self._changes:
            if change.is_a_draw:
                raise PlanError(
                    f"the forward draws random numbers in Python ({change.what}): a plan would freeze those of the "
                    "capture",
                    where=self._line_of(change),
                    fix=DRAW_FIX,
                )

    def _line_of(self, change: Change) -> Where:
        """Return the line that makes the change, in one more call; without a line if it is not the user's."""
        with self.as_before():
            owner = change.holder.owner
            return line_that_changes(lambda: change.is_made, self._call, owner) or Where(owner)

    def refuse_schedules(self) -> None:
        """Raise PlanError if a number that calls count, or a list that they fill, decides something later."""
        if not self._calls:
            return
        first, self._records = len(self._calls), True
        jumps = (FAR, *NEAR) if any(change.is_a_number for change in self._changes) else ()
        for by in jumps:
            with self.moved_on(by):
                self._call_alike(first)
        for _ in range(MORE if any(change.is_new for change in self._changes) else 0):
            self._call_alike(first)
        self._records = False

    def _call_alike(self, first: int) -> None:
        self._call()
        where = self._unlike(self._calls[first:])
        if where is not None:
            raise self._depends(where, []) if self._changes else self._changing(where)

    def refuse_changing(self) -> None:
        """Raise PlanError unless further calls settle: they may change once, as a cache is filled."""
        turns = [(x, y) for x, y in pairwise(self._calls) if x.outputs != y.outputs]
        if turns and (turns[1:] or turns[0][1] is self._calls[-1]):
            raise self._changing(turns[0][1].first_other(turns[0][0]))

    def _changing(self, where: Where | None) -> PlanError:
        return PlanError(
            "the forward computes differently in each call: Python state changes between calls, and a plan would "
            "freeze that of the capture",
            where=where,
            fix=STATE_FIX,
        )

    # ---- state that the forward left

    @property
    def doubts(self) -> bool:
        """Return whether a next forward may compute something else than this one."""
        return bool(self._doubtful or self._draws.doubts or (self._changes and self.unlike is not None))

    @property
    def _doubtful(self) -> list[Change]:
        return [change for change in self._changes if is_doubtful(change, self._is_constant)]

    def _is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) in self._constant

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Restore the state before the first forward."""
        assert self._state is not None
        self._state.restore()
        yield

    @contextmanager
    def moved_on(self, by: int = FAR) -> Iterator[None]:
        """Put the model ``by`` forwards later: the hooks that the first has installed stay."""
        assert self._state is not None
        self._state.restore(with_hooks=False)
        move_on(self._changes, self._later, by)
        yield

    def _later(self, tensor: Tensor) -> Tensor | None:
        """Return the value of ``tensor`` at a later forward; None for the value before the first."""
        if self._is_constant(tensor):
            return self._constant[id(tensor)][1]
        return fake(tensor, None, self._mode)

    def settle(self, exported: torch.export.ExportedProgram, again: Callable[[], Any]) -> None:
        """Raise PlanError unless ``again``, a later call, exports the same graph: the first may have filled a cache."""
        try:
            differing = first_difference(exported, again(), self._fixed_values() | self._filled_buffers())
        except PlanError as error:
            raise self._unsettled(error.where if isinstance(error.where, Where) else Where()) from error
        if differing is not None:
            raise self._unsettled(where_of(differing))

    def note_reads(self) -> None:
        """Remark that clocks and identifiers were read, and did not matter."""
        self.remarks += [(f"the forward reads {what}: its result did not depend on it", at) for what, at in self._read]

    def _constants(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the tensors that the forward left and that are made of constants, while the tracer knows them."""
        mode = proxy_tensor.get_proxy_mode()
        tensors = {id(t): t for change in self._changes for t in tensors_in(change.after)}.values()
        if mode is None or not tensors:
            return
        fixed = self._fixed_nodes(mode.tracer)
        known = {node: value for node, value in fixed.items() if node and not value.is_meta}
        for tensor in tensors:
            node = node_of(tensor, mode.tracer)
            if node is None:
                yield tensor, tensor if not isinstance(tensor, FakeTensor) else None
            elif is_made_of(node, set(fixed)):
                with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
                    yield tensor, value_of(node, mode.tracer.root, known)

    def _refuse_frozen(self) -> None:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None or not (tensors := self._cached.tensors()):
            return
        fixed = self._fixed_nodes(mode.tracer)
        for tensor, function in tensors:
            node = node_of(tensor, mode.tracer)
            if node is not None and not is_made_of(node, set(fixed)):
                refuse_frozen(function)

    def _fixed_nodes(self, tracer: Any) -> dict[Any, Tensor]:
        """Return the nodes of buffers and frozen parameters, with their values."""
        values = self._fixed_values()  # export puts tensors of its own in their place
        named = (*self._model.named_buffers(), *self._model.named_parameters())
        return {node_of(t, tracer): values[name] for name, t in named if name in values}

    def _fixed_values(self) -> dict[str, Tensor]:
        """Return buffers and frozen parameters by name, with the values that the exchange holds."""
        return {name: self._exchange.values(tensor) for name, tensor in self._fixed.items()}

    def _filled_buffers(self) -> dict[str, Tensor]:
        """Return buffers without a value before the forward, by name, with known values that it set."""
        values = {change.what: self._constant.get(id(change.after), (None, None))[1] for change in self._changes}
        return {name: value for name, value in values.items() if value is not None}

    def _unsettled(self, where: Where) -> PlanError:
        return self._changing(self.unlike) if self.is_unknown else self._depends(where, self._read)

    @property
    def _read(self) -> list[tuple[str, Where]]:
        """Return clocks and identifiers, each line once."""
        return list(dict.fromkeys(self._draws.doubts))

    def _depends(self, where: Where, read: list[tuple[str, Where]]) -> PlanError:
        changed = self._doubtful or (self._changes if not read else [])
        if not changed:
            what, line = read[0]
            return PlanError(
                f"the forward computes with {what}: a plan would freeze that of the capture", where=line, fix=STATE_FIX
            )
        names = ", ".join(dict.fromkeys(change.what for change in changed[:3]))
        lines = chain(map(self._line_of, changed), (where, self.unlike or where))
        line = next((w for w in lines if w.line), where)
        return PlanError(
            f"the forward depends on Python state of earlier calls ({names}): a plan would freeze it",
            where=line,
            fix=STATE_FIX,
        )
