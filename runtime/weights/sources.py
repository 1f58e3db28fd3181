"""Sources of full tensors: the user's model, or fresh values for parameters on the meta device.

Fresh values are drawn by the model's own methods with ``initialization.method: model``, and with ``normal`` as below. A
model that was built with ``values_later`` has the values of its construction with either method.

N(0, std)                                  matrices
N(0, std / sqrt(number of residual writes))    matrices that write into the residual
1, 0                                       scales of norms, biases

Normal values are drawn in blocks: each rank draws the blocks of its shard, on several threads.

    flat tensor    | block 0 | block 1 | … | block n |      64 Ki elements each, the last one shorter
    block b        N(0, std) from a generator of (seed, name, b)

A value depends only on the seed, the name, the shape and its position, not on the layout, the number of threads or the
device. Values are drawn in float32 for any dtype, so that all precisions start from the same weights.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.meta_init import buffer_value
from planner.capture.model.recorded import RecordedValues, recorded_values
from planner.frozen_plan import Plan
from planner.saved_plan.model import Skeleton
from planner.spec.spec import Spec
from runtime.distributed.devices import launched
from runtime.weights.own_methods import OwnMethods

BLOCK = 1 << 16


class ModelWeights:
    """Full tensors by dotted name: the values of the module; subclasses make those of parameters on meta.

    ``is_fresh``: the parameter has no values, so that ``parameter`` makes them; ``rows`` makes only some rows. Raises
    PlanError for a tensor on meta that cannot be made.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_fresh(self, fqn: str) -> bool:
        return self._parameters[fqn].is_meta

    def release(self) -> None:
        """Release the user's model, so that full weights are freed once shards are copied."""
        self._model, self._parameters = None, {}

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = self._parameters.get(fqn)
        return self.made(fqn, shape, dtype) if held is None or held.is_meta else held.detach()

    def made(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make the values of a parameter on the meta device."""
        raise PlanError(
            f"parameter {fqn} has no values: the model was built on the meta device",
            fix="build buffers on a real device (parameters may stay on meta), or load weights with "
            "load_pretrained(dir)",
        )

    def rows(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int]) -> Tensor:
        return self.parameter(fqn, shape, dtype)[rows[0] : rows[1]]

    def buffer(self, fqn: str) -> Tensor:
        assert self._model is not None, "the model was released"
        return buffer_value(self._model, fqn)


class OwnWeights(ModelWeights):
    """Fresh weights by the model's own methods, which keep the model, and run when values are needed."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model)
        self._own = OwnMethods(model, seed)

    def made(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._own.value(fqn, shape, dtype)


class RecordedWeights(ModelWeights):
    """The values of the model's construction, made one parameter at a time.

    ``recorded`` also knows the values of a wrapped base, which are in its files, and those computed from them.
    """

    def __init__(self, model: nn.Module, recorded: RecordedValues) -> None:
        super().__init__(model)
        self.recorded = recorded

    def made(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.recorded.value(fqn)

    def is_of_base(self, fqn: str) -> bool:
        """Return whether a parameter is an unchanged tensor of the wrapped base, which is in its files."""
        return fqn in self.recorded and self.recorded.is_of_base(fqn)

    def waits_for_base(self, fqn: str) -> bool:
        return fqn in self.recorded and self.recorded.waits_for_base(fqn)


class WeightsToLoad(ModelWeights):
    """The weights of a plan that was loaded without its model: none, until an engine loads some."""

    def made(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        what = f"parameter {fqn} has no values: a loaded plan lacks the code that draws the values of your model"
        fix = "set method: normal, load weights (MODEL hf:DIR, or load_pretrained), or resume a save"
        raise PlanError(what, where="initialization.method", fix=fix)


class InitialWeights(ModelWeights):
    """N(0, std) for matrices, divided by sqrt(number of residual writes) for those that write into the residual; 1 for
    the scales of norms and 0 for biases. Seeded by (seed, fqn): the values do not depend on the layout.
    """

    def __init__(
        self, model: nn.Module, roles: Mapping[str, str], *, seed: int, std: float, residual_scale: bool
    ) -> None:
        super().__init__(model)
        num_residual = sum(role == "residual" for role in roles.values())
        self._roles, self._seed = roles, seed
        self._std = {"": std, "residual": std / math.sqrt(num_residual) if num_residual and residual_scale else std}

    def made(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.rows(fqn, shape, dtype, None)

    def rows(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int] | None) -> Tensor:
        role = self._roles.get(fqn, "")
        if role in ("scale", "bias"):
            size = shape if rows is None else (rows[1] - rows[0], *shape[1:])
            return torch.full(size, 1.0 if role == "scale" else 0.0, dtype=dtype)
        return normal(fqn, shape, dtype, seed=self._seed, std=self._std[role], rows=rows)


def weight_source(plan: Plan, spec: Spec) -> ModelWeights:
    """Return the weights of the planned model, fresh ones if it is on meta. Raises PlanError if it was released."""
    decisions, model = plan.to_run()[0], plan.model
    if model is None:
        raise PlanError(
            "the planned model is gone: the first Engine took its weights",
            fix="plan the model again, or keep a reference while several engines take weights from it",
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        return ModelWeights(model)
    if (recorded := recorded_values(model)) is not None:
        return RecordedWeights(model, recorded)
    initial = spec.initialization
    if initial.method == "model" and isinstance(model, Skeleton):
        return WeightsToLoad(model)
    if initial.method == "model":
        return OwnWeights(model, spec.seed)
    return InitialWeights(
        model, decisions.roles, seed=spec.seed, std=initial.std, residual_scale=initial.residual_scale
    )


def normal(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seed: int,
    std: float,
    rows: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Draw the full tensor [shape], or its ``rows`` (half open) along dim 0, on the CPU."""
    size, row = prod(shape), prod(shape[1:])
    start, stop = (0, size) if rows is None else (rows[0] * row, rows[1] * row)
    drawn = torch.empty(stop - start, dtype=dtype)

    def draw(block: int) -> None:
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(last - first, generator=generator, dtype=torch.float32)
        low, high = max(first, start), min(last, stop)
        drawn[low - start : high - start].copy_(values[low - first : high - first].mul_(std))

    blocks = blocks_of(start, stop)
    if num_threads is None:  # this rank's part of the cores that the process may use
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = max(1, cores // (launched(os.environ).local_world_size or 1))
    num_threads = min(len(blocks), num_threads)
    if num_threads > 1:  # drawing releases the interpreter lock
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(draw, blocks))
    else:
        for block in blocks:
            draw(block)
    return drawn.view(shape if rows is None else (rows[1] - rows[0], *shape[1:]))


def blocks_of(start: int, stop: int) -> range:
    """Return the blocks of the elements [``start``, ``stop``)."""
    return range(start // BLOCK, -(-stop // BLOCK)) if stop > start else range(0)
