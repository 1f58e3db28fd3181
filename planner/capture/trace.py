"""Export one forward of a model, and check the Python state beside its graph.

    export                  the graph, with the calls that Python made
    further calls           without export: they must compute the same
    recorded calls          if the forward left state: one with the state before it, and one with a later state
    further exports         if these differ, or the forward asked a question that only data answers

A model that was exported at other sizes before is recorded instead (``earlier``).
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from passes.errors import PlanError, Where, first_line, message_of
from passes.partition.batch.align_exports import wider
from passes.program.program import Assumption
from planner.capture.data_dependence import NUMBER_OF_DATA, not_captured
from planner.capture.functional import drop_needless_writes
from planner.capture.gradients.python_side import PythonGradients
from planner.capture.gradients.regions import stop_gradients, write_casts
from planner.capture.model.exchange import Exchange, fake, global_hooks_kept
from planner.capture.own_loss import other_inputs
from planner.capture.python.draws import CertainDraws
from planner.capture.python.watch import ForwardWatch
from planner.capture.recording import CallRecorder, FurtherCall, Recording
from planner.capture.resized import Earlier, FirstExport, KeptExport, Unlike, copied_export
from planner.capture.selection.assumed import Assumptions
from planner.capture.selection.questions import OTHER_ANSWERS, Questions
from planner.capture.user_lines import CallSites, loss_lines, name_sliced_modules
from planner.progress import see_one

_SEVERAL = 4  # sequences of the forward that is compared with one of a single sequence
FORWARD_MUST_WORK = (
    "call the model's forward with one microbatch of these inputs: it must also work on tensors without values (no "
    "numpy, no lists of elements)"
)


@dataclass
class Traced:
    """An export, with its notes and rewrites, and exports with other answers to the questions that it ``asked``."""

    exported: ExportedProgram
    notes: list[str]
    told: list[tuple[str, Where]]
    asked: Questions
    others: list[tuple[Questions, ExportedProgram]]
    assumptions: list[Assumption] = field(default_factory=list)
    first: KeptExport | FirstExport | None = None
    gradient: Where | None = None  # the line of a gradient inside the forward
    widens: bool = True  # whether a forward of more sequences made the same calls on wider tensors


@dataclass(frozen=True)
class Forward:
    """A model and one microbatch for it; the tensors of both are exchanged for fakes of one ``mode``."""

    model: nn.Module
    kwargs: dict[str, torch.Tensor]
    exchange: Exchange
    mode: FakeTensorMode

    def watch(self) -> ForwardWatch:
        return ForwardWatch(self.model, self.kwargs, self.exchange, self.mode)

    def recorder(self) -> CallRecorder:
        return CallRecorder(self.model, self.kwargs, self.mode)

    def questions(self, assumed: Assumptions, *answer: Any) -> Questions:
        return Questions(CallSites(self.model), assumed, *answer)


def traced(forward: Forward, earlier: Earlier, *, is_known: bool) -> Traced:
    """Export ``forward`` with answers after which no check of values raises. ``earlier``: captures of the same model at
    other sizes; if the first was kept, this forward is recorded and not exported, where that is possible. ``is_known``:
    return the graph alone, and skip the checks of Python state.
    """
    if isinstance(earlier.first, KeptExport):
        earlier.first = _recorded_now(forward, earlier.first)
    found = None if earlier.first is None else _resized(forward, earlier, earlier.first, is_known)
    if found is not None:
        return found
    assumed = Assumptions()

    def trial() -> None:
        watch = forward.watch()
        with watch.installed(), PythonGradients().watched(forward.model):
            _export(forward, watch, forward.questions(assumed))

    made = assumed.settled(lambda: _attempted(forward, assumed, is_known), trial)
    made.assumptions = assumed.found(made.exported.graph_signature.user_inputs)  # pyright: ignore
    if made.assumptions:
        made.first = None
    return made


def _attempted(forward: Forward, assumed: Assumptions, is_known: bool) -> Traced:
    """Export the forward and check its Python state by further calls. Export it again if it asked a question that only
    data answers, or left state with which a recorded call computes something else; once if it ``is_known``.
    """
    watch, gradients, asked = forward.watch(), PythonGradients(), forward.questions(assumed)
    others: list[tuple[Questions, ExportedProgram]] = []
    copies = list[ExportedProgram]()
    with watch.installed():
        with gradients.watched(forward.model):
            exported = _export(forward, watch, asked, None if is_known else copies)
        made = Traced(exported, [], [], asked, others, gradient=gradients.asked_at)
        if is_known:
            return made
        made.notes, made.told = gradients.notes, [*gradients.regions.told()]
        with gradients.watched(forward.model), quietness():
            watch.refuse_draws()
            if not _are_alike(forward, watch, [FurtherCall(forward.mode), FurtherCall(forward.mode)]):
                watch.call_again()
            elif all(t.dim() and t.shape[0] == 1 for t in forward.kwargs.values()):
                made.widens = _widens(forward, watch)
            if watch.is_unknown:
                watch.settle(exported, lambda: _export(forward, watch, forward.questions(assumed)))
        for answer in OTHER_ANSWERS if asked.asked else ():
            with watch.as_before(), gradients.watched(forward.model):
                others.append((again := forward.questions(assumed, answer), _export(forward, watch, again)))
        if watch.left_nothing and not asked.asked:
            made.first = KeptExport(copies[0], forward.kwargs)
        if watch.doubts:
            made.first = None if asked.asked else _unmoved(forward, watch, gradients, copies[0])
            with watch.moved_on(), gradients.watched(forward.model):
                if made.first is None:
                    watch.settle(exported, lambda: _export(forward, watch, forward.questions(assumed)))
            watch.note_reads()
        watch.refuse_changing()
        with gradients.watched(forward.model), quietness():
            watch.refuse_schedules()
    made.told += watch.remarks
    return made


def _matched(exported: ExportedProgram, recording: Recording | None) -> FirstExport | None:
    with suppress(Unlike, LookupError, StopIteration):  # of a value that the recording lacks
        return None if recording is None else FirstExport(exported, recording)
    return None


def _recorded_now(forward: Forward, kept: KeptExport) -> FirstExport | None:
    """Record a forward of the size of ``kept``; return None if it does not compute the same as the export."""
    first = replace(forward, kwargs={name: fake(value, None, forward.mode) for name, value in kept.inputs.items()})
    watch = first.watch()
    with suppress(Exception), watch.installed(), PythonGradients().watched(first.model):
        return _matched(kept.exported, _recorded(first, watch))
    return None


def _unmoved(
    forward: Forward, watch: ForwardWatch, gradients: PythonGradients, exported: ExportedProgram
) -> FirstExport | None:
    """Return the export with its recording if the model makes the same calls many forwards later; else None."""

    def recorded(state: AbstractContextManager[None]) -> Recording | None:
        with state, gradients.watched(forward.model):
            return _recorded(forward, watch)

    before, later = recorded(watch.as_before()), recorded(watch.moved_on())
    first = None if later is None else _matched(exported, before)
    return first if first is not None and later is not None and first.is_again(later) else None


def _recorded(forward: Forward, watch: ForwardWatch) -> Recording | None:
    """Record one call, which is compared with no other call; return None if it did not end."""
    recorder = forward.recorder()
    with quietness(), forward.questions(Assumptions()).answered():
        watch.run(recorder)
    return recorder.found


def _are_alike(forward: Forward, watch: ForwardWatch, calls: list[FurtherCall]) -> bool:
    """Return whether further calls in export's modes end, and compute the same as earlier calls. If they do not, and a
    branch asked for data, they are not counted: the branch may have got another answer.
    """
    questions = forward.questions(Assumptions())
    with quietness(), questions.answered():
        are_alike = watch.calls_alike(calls)
    if not are_alike and questions.were_answered:
        watch.forget_calls()
    return are_alike


def _widens(forward: Forward, watch: ForwardWatch) -> bool:
    """Return whether a forward of several sequences does to each what that of one does: a graph of one does not show
    a cut to the first sequence, a literal 1 in place of the batch, or a branch on its size.
    """
    more = {name: fake(t, None, forward.mode) for name, t in wider(forward.kwargs, _SEVERAL).items()}
    with forward.questions(Assumptions()).answered():
        return watch.widens(CallRecorder(forward.model, more, forward.mode), more)


def _resized(forward: Forward, earlier: Earlier, first: FirstExport, is_known: bool) -> Traced | None:
    """Return ``first`` at the sizes of ``forward``. Return None if the forward branches on sizes, or leaves state that
    no earlier capture has settled: then it is exported, which reports the reason.
    """
    watch, gradients, recorder = forward.watch(), PythonGradients(), forward.recorder()
    further = [] if earlier.was_repeated else [FurtherCall(forward.mode)]
    with suppress(Exception), watch.installed():
        with gradients.watched(forward.model):
            are_alike = is_known or (_are_alike(forward, watch, [recorder, *further]) and watch.left_nothing)
            found = _recorded(forward, watch) if is_known else recorder.found
        if are_alike and found is not None:
            exported = _named(first.at(found), forward.model)
            earlier.was_repeated |= not is_known
            told, asked = [*gradients.regions.told()], forward.questions(Assumptions())
            return Traced(exported, gradients.notes, told, asked, [], gradient=gradients.asked_at)
    return None


def _export(
    forward: Forward, watch: ForwardWatch, asked: Questions, copies: list[ExportedProgram] | None = None
) -> ExportedProgram:
    """Export the forward. ``copies`` receives the graph as torch.export made it. Raises PlanError."""
    model, kwargs = forward.model, forward.kwargs

    def check(args: Any, kwargs: Any) -> None:
        see_one("ops")
        watch.check(args, kwargs)

    try:
        draws, no_code = CertainDraws(check, asked.draw_is_not_zero), _use_lazy_graph_module(True)
        # intermediate graphs get no Python code: nothing runs them
        with draws, asked.answered(), loss_lines(model), global_hooks_kept(), quietness(), no_code:
            exported = torch.export.export(model, (), kwargs, strict=False)
        if copies is not None:
            copies.append(exported)
        return _named(copied_export(exported)[0], model)
    except (PlanError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of the user's forward: it may derive from any class
        where = CallSites(model).of(error)
        if isinstance(error, TypeError) and where.file.endswith("inspect.py"):
            raise other_inputs(error) from error
        text = message_of(error).strip()
        what = text.splitlines()[0] if text and isinstance(error, Exception) else first_line(error)
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            op = what.removesuffix(".default").removesuffix(".Tensor")
            what = f"the result of {op} depends on the values of tensors"
            raise not_captured(f"{what} (data-dependent)", where) from error
        if "data-dependent" in what or "SymInt" in what or "SymFloat" in what:
            raise not_captured(NUMBER_OF_DATA, where) from error
        raise not_captured(what, where, FORWARD_MUST_WORK) from error


def _named(exported: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """Write out casts of autocast, name modules as the model does, drop calls that change nothing."""
    drop_needless_writes(exported.graph)
    stop_gradients(exported.graph)
    write_casts(exported.graph)
    name_sliced_modules(exported.graph, model)
    return exported


@contextmanager
def quietness() -> Iterator[None]:
    """Silence warnings, logs and partial graphs of torch.export, and advice of transformers."""
    levels = [(logger, logger.level) for logger in map(logging.getLogger, ("torch", "transformers"))]
    for logger, _ in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
