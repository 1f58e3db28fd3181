"""The reference: the unmodified model in one process, trained by plain torch on the full global batch.

No decision of the planner and no pass takes part, so that a difference from the engine is one from the user's model.

The model itself is trained, not a copy. A copy may be another model: tensors in a closure, a hook or a patched forward
stay those of the original, so that a copied reference would lose the same weights as a copied capture, and agree with
it. A second build from the same seed is equal only if every draw of the constructor follows torch's seed. The object
itself needs no such assumption, and ``Untouched`` checks that nothing has changed it before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.program.matrices import Matrices
from planner.capture.model.eager import caches_off, in_eager_mode
from planner.capture.model.exchange import swap
from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import load_model
from planner.capture.own_loss import apply_loss
from planner.frozen_plan import Plan
from planner.sharding.parameters import ParameterPlan
from planner.spec.optimizer import OptimizerSpec
from planner.spec.spec import Spec
from planner.spec.update_rules import PREFIX, UPDATE_RULES, class_of, options_of
from planner.updates import Settings, base_of, settings_of
from runtime.audit.own_module import loss_of, stand_in
from runtime.checkpoint.conversion import described
from runtime.checkpoint.pretrained_load import find_in, read_whole
from runtime.checkpoint.weight_files import WeightFiles
from runtime.optimizer.scalars import LearningRate
from runtime.verify.batches import each_document_alone
from runtime.weights.initial_weights import fingerprint_of_model
from runtime.weights.sources import weight_source

if TYPE_CHECKING:
    from runtime.verify.named_draws import NamedDraws  # imports the capture, which training does not need


class Untouched:
    """The fingerprints of a model's weights before it was planned."""

    def __init__(self, model: nn.Module) -> None:
        self._before = fingerprint_of_model(model)

    def check(self, model: nn.Module) -> None:
        """Raise PlanError if ``model`` has changed since: the reference must start from the same weights."""
        now = fingerprint_of_model(model)
        names = [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
        if names:
            what = f"the plan or its engine has changed the model: {names[0]}, {len(names)} tensors in all"
            fix = "this is a bug in meshwright: please report it with the model"
            raise PlanError(what, where=names[0].rpartition(".")[0], fix=fix)


def with_values(model: nn.Module, reference: str, plan: Plan, spec: Spec) -> nn.Module:
    """Return the planned ``model`` if it has values, else a new one with those of its directory or seed, in its mode.

    A model that its code builds on the meta device gets the values that engines draw for it.
    """
    if not _is_on_meta(model):
        return model
    loaded = load_model(reference, materialize=True, seed=spec.seed, fill=fill_from_files).train(model.training)
    if _is_on_meta(loaded):
        source = weight_source(plan, spec)
        _fill(loaded, lambda name, p: source.parameter(name, tuple(p.shape), p.dtype).clone())
    return loaded


def fill_from_files(model: nn.Module, directory: Path) -> None:
    """Give a model on the meta device the values of its directory."""

    def read(name: str, parameter: nn.Parameter) -> Tensor:
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        read_whole(files, sources.parameters[name][0], value)
        return value

    with WeightFiles(directory) as files:
        sources = find_in(files, hub_format(model), described(model))
        _fill(model, read)
        for name, source in sources.buffers.items():
            read_whole(files, source, model.get_buffer(name))


def _fill(model: nn.Module, value_of: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace the values inside the parameter objects, so that tied parameters stay tied."""
    for name, parameter in model.named_parameters():
        swap(parameter, stand_in(parameter, value_of(name, parameter)))


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _dtype_of(spec: Spec) -> torch.dtype | None:
    from planner.captured import dtype_of  # imports the capture, which training does not need

    return dtype_of(spec)


def in_its_dtype(batch: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return ``batch`` with its floats in the dtype of the parameters, if the spec sets one, as ranks read it."""
    dtype = _dtype_of(spec)
    return {name: v if dtype is None or not v.is_floating_point() else v.to(dtype) for name, v in batch.items()}


class OneProcess:
    """Trains ``model`` itself. Owns torch's optimizers, and the number of updates.

    Made after the engine with which it is compared, because that copies its weights from the same model.
    ``draws``: replaces random numbers, if dropout is on. ``parameters``: the plan's rows, if a rule updates matrices.
    ``ignored``: key → ignored label, if each document gets its own row.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        draws: NamedDraws | None = None,
        parameters: Iterable[ParameterPlan] = (),
        ignored: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.draws, self.ignored = model, draws, ignored
        if (dtype := _dtype_of(spec)) is not None:
            self.model.to(dtype)
        self.spec = spec
        self._module, self._wanted = apply_loss(model, spec.loss)
        self.rate = LearningRate(spec.optimizer)
        self._mains = Mains(self.model)
        self.matrices = {p.name: p.matrices for p in parameters if p.matrices}
        self.optimizers = optimizers_of(self.model, spec.optimizer, self.matrices, self._mains)
        self.num_updates = 0

    def forward_backward(self, batch: Mapping[str, Tensor]) -> float:
        """Return the loss of the global batch, and leave gradients in ``.grad``."""
        self.model.zero_grad()
        draws = self.draws
        if self.ignored is not None:
            batch = each_document_alone(batch, self.spec, self.ignored)
        # caches are for generation: some models mask differently with one
        rows = self.spec.in_rows(batch)
        drawn = nullcontext() if draws is None else draws.forward(self.num_updates, rows)
        with in_eager_mode(), caches_off(self.model), drawn:
            loss = loss_of(self._module(**in_its_dtype(batch, self.spec)), self._wanted)
        with in_eager_mode(), nullcontext() if draws is None else draws.backward():
            loss.backward()
        return loss.item()

    def update(self) -> float:
        """Update once, with clipped gradients; return the gradient norm before clipping."""
        o = self.spec.optimizer
        self._mains.read()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, o.clip_grad_norm or float("inf"))
        rate = self.rate.at(self.num_updates)
        for group in groups:
            group["lr"] = rate * group["factor"]
        for optimizer in self.optimizers:
            optimizer.step()
        self._mains.write()
        self.num_updates += 1
        return norm.item()

    def train_step(self, batch: Mapping[str, Tensor]) -> float:
        loss = self.forward_backward(batch)
        self.update()
        return loss


class Mains:
    """Float32 copies of the trained float16 parameters, which the optimizer updates instead: in float16, AdamW's eps is
    zero, so a gradient of zero would make the weight NaN."""

    def __init__(self, model: nn.Module) -> None:
        halves = (p for p in model.parameters() if p.dtype == torch.float16 and p.requires_grad)
        self._of: dict[Tensor, Tensor] = {p: nn.Parameter(p.detach().float()) for p in halves}

    def of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates."""
        return self._of.get(parameter, parameter)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the gradients, and weights that have changed since ``write``, into the copies."""
        for parameter, main in self._of.items():
            main.copy_(torch.where(main.to(parameter.dtype) == parameter, main, parameter.float()))
            main.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def write(self) -> None:
        """Copy the updated weights, rounded, into the parameters."""
        for parameter, main in self._of.items():
            parameter.copy_(main)


class _Own(torch.optim.Optimizer):
    """An optimizer with the arguments of torch's own: groups, and defaults by name."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)


class Lion(_Own):
    """Lion (Chen et al. 2023): the sign of a mean of gradients, with decoupled weight decay."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(first * mean + (1 - first) * p.grad))
                mean.mul_(second).add_(p.grad, alpha=1 - second)


class ScheduleFree(_Own):
    """Schedule-free AdamW (Defazio et al. 2024): parameters are y; z and the sum of squared rates are the state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for y in (p for p in group["params"] if p.grad is not None):
                state = self.state[y]
                z, mean = state.setdefault("z", y.clone()), state.setdefault("mean", torch.zeros_like(y))
                state["count"], state["sum"] = state.get("count", 0) + 1, state.get("sum", 0.0) + lr * lr
                mean.mul_(second).addcmul_(y.grad, y.grad, value=1 - second)
                update = y.grad / ((mean / (1 - second ** state["count"])).sqrt() + group["eps"])
                update.add_(y, alpha=group["weight_decay"])
                share = lr * lr / state["sum"] if state["sum"] else 1.0
                x = (y - (1 - first) * z) / first
                z.sub_(update, alpha=lr)
                x.lerp_(z, share)
                y.copy_((1 - first) * z + first * x)


class WholeMatrices(_Own):
    """torch's Muon for each of the matrices in a weight (passes.program.matrices).

    A group has ``matrices`` for each of its parameters.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p, matrices in zip(group["params"], group["matrices"], strict=True):
                if p.grad is not None:
                    self._update(p, matrices, group)

    def _update(self, p: Tensor, matrices: Matrices, group: dict[str, Any]) -> None:
        places = list(places_of(tuple(p.shape), matrices))
        parts = [torch.cat([p[box] for box in boxes], dim) for dim, boxes in places]
        if "own" not in self.state[p]:
            options = {key: group[key] for key in ("weight_decay", "momentum", "nesterov")}
            own = torch.optim.Muon([nn.Parameter(x) for x in parts], adjust_lr_fn=group["adjust_lr"], **options)
            self.state[p]["own"] = own
        own: torch.optim.Optimizer = self.state[p]["own"]
        own.param_groups[0]["lr"] = group["lr"]
        parameters = own.param_groups[0]["params"]
        for part, now, (dim, boxes) in zip(parameters, parts, places, strict=True):
            part.copy_(now)
            part.grad = torch.cat([p.grad[box] for box in boxes], dim)  # pyright: ignore[reportOptionalSubscript]
        own.step()
        for part, (dim, boxes) in zip(parameters, places, strict=True):
            for box, value in zip(boxes, part.chunk(len(boxes), dim), strict=True):
                p[box] = value


def places_of(shape: tuple[int, ...], matrices: Matrices) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Yield, for each matrix in a weight, the dim along which its boxes are concatenated, and the boxes."""
    dim = matrices.dim - (len(shape) - 2)
    for place in product(*(range(n) for n in shape[:-2])):
        for index in range(len(matrices.sizes)):
            runs = [slice(a, b) for a, b in matrices.ranges(index)]
            yield dim, [(*place, run) if dim == 0 else (*place, slice(None), run) for run in runs]


def optimizers_of(
    model: nn.Module, o: OptimizerSpec, matrices: Mapping[str, Matrices], mains: Mains
) -> list[torch.optim.Optimizer]:
    """Return optimizers of the trained parameters, or their ``mains``; groups have the ``factor`` of the learning rate.

    ``matrices``: name → matrices of the weights that a rule of matrices updates.
    """
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for settings, group in _groups(model, o, matrices, mains):
        by_rule.setdefault(settings.rule, []).append(group)
    return [_of_rule(rule, groups, o) for rule, groups in by_rule.items()]


def _of_rule(rule: str, groups: list[dict[str, Any]], o: OptimizerSpec) -> torch.optim.Optimizer:
    lr = o.lr
    if rule.startswith(PREFIX):
        own = [{key: group[key] for key in ("params", "factor", "weight_decay")} for group in groups]
        kind: Any = class_of(rule)
        return kind(own, lr=lr, **dict(options_of(o)))
    own_classes: dict[str, Any] = {"lion": Lion, "schedule_free_adamw": ScheduleFree, "muon": WholeMatrices}
    kind = own_classes.get(rule) or getattr(torch.optim, UPDATE_RULES[rule].of_torch)
    return kind(groups, lr=lr)


def _groups(
    model: nn.Module, optimizer: OptimizerSpec, matrices: Mapping[str, Matrices], mains: Mains
) -> Iterator[tuple[Settings, dict[str, Any]]]:
    """Yield a group of torch for each distinct settings of trained parameters."""
    named = dict(model.named_parameters())
    rows = [replace(row, matrices=matrices.get(row.name)) for row in described(model)]
    own, base = settings_of(optimizer, rows), base_of(optimizer)
    by_settings: dict[Settings, list[str]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            by_settings.setdefault(own.get(name, base), []).append(name)
    keys = ("betas", "eps", "weight_decay", "momentum", "nesterov", "adjust_lr")
    for settings, names in by_settings.items():
        group = {"params": [mains.of(named[name]) for name in names], "factor": settings.factor(base)}
        group |= {key: getattr(settings, key) for key in keys}
        yield settings, group | {"matrices": [matrices.get(name) for name in names]}
