"""Find the op of the first NaN or Inf: rerun the stages of a rank op by op, and check each value.

    forward     a NaN or Inf comes from the first op on its path with finite inputs
    backward    the same for gradients, if all losses were finite

An infinity from user code (``masked_fill(…, -inf)``) is not a fault, nor is one that does not reach a loss. Each rank
reports only values of its own ops, and ``first_of`` finds the first over all ranks.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from passes.base import StageModule, kind_of
from passes.errors import Where
from passes.interceptors import installed
from passes.ops.region import run_piece, run_region
from passes.program.ops.aten import has_gradient
from passes.program.source_lines import module_of, origin_above, where_of
from planner.pipeline.schedule import Action
from runtime.pipeline.executor import Executor

PARAMETER, BATCH, FORWARD, BACKWARD, SUM, ONCE = "parameter", "batch", "forward", "backward", "sum", "once"
_PHASES = (PARAMETER, BATCH, FORWARD, BACKWARD, SUM, ONCE)


MOST_RANKS = 4  # maximum number of ranks in a message


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A value that is NaN or infinite.

    ``phase``: "parameter" (before the step), "batch" (an input), "forward", "backward" (a gradient), "sum" (the sum
    of finite gradients over microbatches and ranks), or "once" (a gradient that is finite in a rerun).
    ``name``: of the module, parameter or input. ``op`` and ``where``: the op that computed it, and the user's line.
    ``value``: NaN or infinity. ``microbatch``: index in the global batch; -1: none. ``rank``: the lowest of ``ranks``,
    on which it appeared first. ``place``: its order within one phase, microbatch and stage.
    """

    phase: str
    name: str
    value: str
    op: str = ""
    where: Where | None = None
    rank: int = 0
    stage: int = -1
    microbatch: int = -1
    place: tuple[int, ...] = field(default=(), repr=False)
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        at = _ranks_words(self.ranks or (self.rank,)) + (f", stage {self.stage}" if self.stage >= 0 else "")
        at += f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        what = {
            PARAMETER: f"the parameter {self.name} had {self.value} before the step",
            BATCH: f"{self.name} of the batch contains {self.value}",
            FORWARD: f"the first {self.value} of the forward comes from {self.op} in {self.name or 'the model'}",
            BACKWARD: f"the first {self.value} of the backward comes from {self.op} in {self.name or 'the model'}",
            SUM: f"the gradient of {self.name} is {self.value} only after its reduction",
            ONCE: f"the gradient of {self.name} was {self.value} before its reduction, and is finite in a rerun of "
            "the step",
        }[self.phase]
        line = f"\n  at:  {self.where}" if self.where is not None and str(self.where) else ""
        return f"{what} ({at}){line}"


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of one rank. ``sent``: values of its ops that it only sent, faults if the loss of their microbatch is not
    finite; ``bad_losses``: the microbatches with such a loss."""

    found: tuple[NonFinite, ...] = ()
    sent: tuple[NonFinite, ...] = ()
    bad_losses: frozenset[int] = frozenset()


def first_of(seen: Iterable[Seen]) -> NonFinite | None:
    """Return the first non-finite value over all ranks; None if every value was finite."""
    seen = list(seen)
    bad_losses = frozenset[int]().union(*(s.bad_losses for s in seen))
    found = [f for s in seen for f in s.found]
    found += [f for s in seen for f in s.sent if f.microbatch in bad_losses]
    if any(f.phase == FORWARD for f in found):  # errors after a bad forward are its consequences
        found = [f for f in found if _PHASES.index(f.phase) <= _PHASES.index(FORWARD)]
    first = min(found, key=_order, default=None)
    if first is None or first.phase in (BATCH, FORWARD, BACKWARD):
        return first
    alike = {f.rank for f in found if _order(f)[:-1] == _order(first)[:-1] and f.name == first.name}
    return replace(first, ranks=tuple(sorted(alike)))


def _ranks_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:MOST_RANKS]))}{more}"


def _order(found: NonFinite) -> tuple[Any, ...]:
    stage = -found.stage if found.phase == BACKWARD else found.stage
    return _PHASES.index(found.phase), found.microbatch, stage, found.place, found.rank


def worst(values: Any) -> str:
    """Return "NaN" or "infinity" if a tensor among the values holds one, else ""."""
    if isinstance(values, (list, tuple)):
        return max(map(worst, values), key=("", "infinity", "NaN").index, default="")
    if not isinstance(values, Tensor) or not has_gradient(values.dtype) or values.is_meta:
        return ""
    if bool(torch.isfinite(values).all()):
        return ""
    return "NaN" if bool(torch.isnan(values).any()) else "infinity"


class Watch:
    """Checks the values of one rank. Owns the results, which ``seen`` has after the step."""

    def __init__(self, rank: int, first_microbatch: int) -> None:
        self.rank, self.first_microbatch = rank, first_microbatch
        self._found: list[NonFinite] = []
        self._sent: list[NonFinite] = []
        self._bad_losses: set[int] = set()
        self._backward: dict[tuple[int, int], NonFinite | None] = {}  # (stage, microbatch) → value; None: received
        self.action: Action | None = None

    @property
    def seen(self) -> Seen:
        gradients = (maker for maker in self._backward.values() if maker is not None)
        return Seen((*self._found, *gradients), tuple(self._sent), frozenset(self._bad_losses))

    @property
    def microbatch(self) -> int:
        assert self.action is not None, "no forward is running"
        return self.first_microbatch + self.action.microbatch

    def over(self, executor: Executor) -> AbstractContextManager[None]:
        """Return a context in which every forward of the stages runs op by op."""
        checked = [(stage, "module", _Checked(stage, self)) for stage in executor.stages]
        return installed(*checked, (executor, "before_forward", partial(setattr, self, "action")))

    def note(self, phase: str, name: str, value: str, *place: int, stage: int = -1, microbatch: int = -1) -> None:
        """Add a value that no op of this rank made."""
        self._found.append(
            NonFinite(phase, name, value, rank=self.rank, stage=stage, microbatch=microbatch, place=place)
        )

    def made(self, stage: StageModule, microbatch: int, node: fx.Node, place: tuple[int, ...], value: str) -> NonFinite:
        """Return the report of an op. An inserted op is reported at the op that made its input."""
        known = origin_above(node)
        at = {"rank": self.rank, "stage": stage.index, "microbatch": microbatch, "place": place}
        return NonFinite(FORWARD, module_of(known), value, kind_of(node), where_of(known), **at)

    def forward_ended(self, stage: StageModule, sent: Sequence[NonFinite | None], loss: NonFinite | str | None) -> None:
        """Note the causes of bad sent values, and of a bad loss ("": caused by another rank; None: a finite loss)."""
        self._sent += [maker for maker in sent if maker is not None]
        if loss is None:
            return
        self._bad_losses.add(self.microbatch)
        if isinstance(loss, NonFinite):
            self._found.append(loss)

    def gradient(self, stage: StageModule, microbatch: int, maker: NonFinite | None) -> None:
        """Note a bad gradient of a microbatch. The first one counts, unless the next stage sent bad ones (None)."""
        if maker is None:
            self._backward[stage.index, microbatch] = None
        else:
            first = replace(maker, phase=BACKWARD, place=tuple(-n for n in maker.place))
            self._backward.setdefault((stage.index, microbatch), first)


class _Checked:
    """Replaces a stage's module: computes the same values, and checks each."""

    def __init__(self, stage: StageModule, watch: Watch) -> None:
        self.stage, self.watch, self.module = stage, watch, stage.module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *values: Any) -> Any:
        stage, watch = self.stage, self.watch
        nodes = self.module.graph.find_nodes(op="placeholder")
        makers: dict[str, Any] = {}
        for index, (node, value) in enumerate(zip(nodes, values, strict=True)):
            if bad := worst(value):
                makers[node.name] = _ELSEWHERE
                at = index - len(stage.receives)
                if 0 <= at < len(stage.inputs):
                    watch.note(BATCH, stage.inputs[at], bad, stage=stage.index, microbatch=watch.microbatch)
        run = _Run(self.module, stage, watch, makers)
        outputs = run.run(*values)
        by_output = [makers.get(node.name) for node in _returned(self.module.graph)]
        sent = [maker for maker in by_output[: len(stage.sends)] if isinstance(maker, NonFinite)]
        loss = by_output[-1] if stage.has_loss and worst(outputs[-1]) else None
        watch.forward_ended(stage, sent, "" if loss is _ELSEWHERE else loss)
        for value in outputs[: len(stage.sends)]:
            run.note_received_gradient(value)
        run.hooked.clear()  # break the cycle of functions, their hooks, and this run
        return outputs


_ELSEWHERE = "elsewhere"  # received from another rank, or in the batch
_MEANT = "meant"  # an infinity that the user's code writes


class _Run(fx.Interpreter):
    """One forward, op by op. ``makers``: name of a value with NaN or Inf → its cause, filled during the forward."""

    def __init__(
        self,
        module: fx.GraphModule,
        stage: StageModule,
        watch: Watch,
        makers: dict[str, Any],
        place: tuple[int, ...] = (),
        functions: set[Any] | None = None,
    ) -> None:
        super().__init__(module)
        self.stage, self.watch, self.makers, self.place = stage, watch, makers, place
        self.microbatch = watch.microbatch
        self.index = {node: index for index, node in enumerate(module.graph.nodes)}
        self.hooked: set[Any] = set() if functions is None else functions

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target in (run_region, run_piece):
            return self._part(n)
        result = super().run_node(n)
        if n.op == "get_attr":
            if worst(result):
                self.makers[n.name] = _ELSEWHERE if isinstance(result, torch.nn.Parameter) else _MEANT
        elif n.op == "call_function":
            if bad := worst(result):
                self.makers[n.name] = self._maker(n, bad)
            for value in result if isinstance(result, (list, tuple)) else [result]:
                self._hook(n, value)
        return result

    def _maker(self, node: fx.Node, bad: str) -> Any:
        known = [self.makers[i.name] for i in node.all_input_nodes if i.name in self.makers]
        own = [maker for maker in known if isinstance(maker, NonFinite)]
        if own:
            return min(own, key=lambda maker: maker.place)
        if _ELSEWHERE in known:
            return _ELSEWHERE
        given = [v for v in (*node.args, *node.kwargs.values()) if isinstance(v, float)]
        if bad == "infinity" and (_MEANT in known or any(map(math.isinf, given))):
            return _MEANT
        return self.watch.made(self.stage, self.microbatch, node, (*self.place, self.index[node]), bad)

    def _part(self, node: fx.Node) -> Any:
        """Run a part of a stage that is its own graph, op by op."""
        handle, *given_values = self.fetch_args_kwargs_from_env(node)[0]
        inputs, held = (*given_values, [])[:2]
        through = handle.through if node.target is run_region else ()
        given: list[Any] = [n for listed in node.args[1:] for n in _nodes(listed)]
        makers: dict[str, Any] = {}
        for inner, outer in zip(handle.module.graph.find_nodes(op="placeholder"), given, strict=True):
            if outer.name in self.makers:
                makers[inner.name] = self.makers[outer.name]
        place = (*self.place, self.index[node])
        outputs = _Run(handle.module, self.stage, self.watch, makers, place, self.hooked).run(*inputs, *held)
        by_output = [makers.get(n.name) for n in _returned(handle.module.graph)]
        known = [m for m in (*by_output, *(self.makers.get(given[i].name) for i in through)) if m is not None]
        if known:  # one cause for all outputs: the getitem of a bad output shows which one it is
            self.makers[node.name] = min(known, key=lambda maker: getattr(maker, "place", (math.inf,)))
        return (*outputs, *(inputs[i] for i in through))

    # ---- gradients

    def _hook(self, node: fx.Node, value: Any) -> None:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return
        function = value.grad_fn
        if function not in self.hooked:  # a view or an item of a tuple shares the function of its base
            self.hooked.add(function)

            def made(inputs: Any, outputs: Any) -> None:
                bad = worst(inputs)
                if bad and not worst(outputs):
                    self._gradient(node, bad)

            function.register_hook(made)
        users = [user for user in node.users if user.op == "call_function"]

        def arrived(gradient: Tensor) -> None:
            if bad := worst(gradient):
                self._gradient(users[0] if users else node, bad)

        value.register_hook(arrived)

    def _gradient(self, node: fx.Node, bad: str) -> None:
        place = (*self.place, self.index[node])
        self.watch.gradient(self.stage, self.microbatch, self.watch.made(self.stage, self.microbatch, node, place, bad))

    def note_received_gradient(self, value: Tensor) -> None:
        """Check a gradient that the next stage sends, before the gradients of this stage."""
        if value.requires_grad:
            stage, microbatch, watch = self.stage, self.microbatch, self.watch

            def arrived(gradient: Tensor) -> None:
                if worst(gradient):
                    watch.gradient(stage, microbatch, None)

            value.register_hook(arrived)


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return _nodes(next(iter(graph.find_nodes(op="output"))).args[0])


def _nodes(listed: Any) -> list[fx.Node]:
    return [node for node in listed if isinstance(node, fx.Node)]
