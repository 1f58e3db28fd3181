"""The global batch of any step: the samples of an objective that it holds, under the names of the model's inputs.

    sample k = step · global + row;  epoch k // n, place k % n;  index = permutation of (seed, epoch) at that place

The permutation is computed place by place, not stored. It is a Feistel network over the next even number of bits, keyed
by integers: each round is invertible, so the composition is a bijection of 0..2^b-1. Values outside 0..n-1 are permuted
again until they are inside (cycle walking; on average less than four times), which leaves a bijection of 0..n-1. (Black
and Rogaway, "Ciphers with arbitrary finite domains".)

The role of an input follows from its name, or from the spec's ``data.inputs``:

input_ids, tokens, idx, x                      the window [length]
labels                                         the same window (for models that shift labels)
targets, y                                     the window one token later (for models that do not)
attention_mask                                 1, and 0 on padding
token_type_ids, segment_ids                    0 in the first text, 1 in the second
position_ids                                   0 to length - 1; with packing: documents, from 0 in each
document_ids, doc_ids                          index of each token's document in the sequence
document_mask [1, length, length]              True if a token may attend to another: same document, not later
cu_seqlens [n]                                 0, then the end of each document in the sequence, then the length
next_sentence_label, sentence_order_label      [] 1 if the two texts are swapped, else 0
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from passes.errors import PlanError
from planner.spec.inputs import NAMES, ROLES, DataSpec, InputSpec
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout
from runtime.data.objectives.masked import masked
from runtime.data.objectives.next_token import next_token
from runtime.data.objectives.samples import ALL, NO_ROLES, Make, Objective, Roles, Within
from runtime.data.tokens import Tokens

OBJECTIVES: dict[str, Make] = {"next_token": next_token, "masked": masked}
_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_AHEAD = 2  # batches that the thread makes ahead
SHAPES = {"sentence_order": "[]", "document_mask": "[1, length, length]", "cu_seqlens": "[n]"}  # other roles: [length]
OF_IDS = ("tokens", "next_tokens", "labels")  # roles that hold ids of the vocabulary


class Batches(Protocol):
    """Batches by step: a pure function, the same on every rank."""

    def batch(self, step: int) -> dict[str, Tensor]: ...


class BatchesByRows(Protocol):
    """Global batches by step, or some rows of them: a pure function, the same on every rank."""

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]: ...
    def size_of(self, step: int) -> int: ...


class OwnRows:
    """The rows of one dp rank of each global batch; other rows are not made.

    dp rank d     rows [d·G/dp, (d+1)·G/dp), for ``train_step(batch, local=True)``

    ``is_local``: whether these are fewer than all rows.
    """

    def __init__(self, batches: BatchesByRows, layout: BatchLayout) -> None:
        self.batches, self.is_local = batches, layout.dp > 1
        self._ranks, self._rank = layout.dp, layout.dp_rank

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return this rank's rows of a step."""
        if not self.is_local:
            return self.batches.batch(step)
        size = self.batches.size_of(step) // self._ranks
        return self.batches.batch(step, slice(self._rank * size, (self._rank + 1) * size))


class OfSamples(ABC):
    """Batches of one size, made of numbered samples."""

    global_size: int

    @property
    @abstractmethod
    def num_samples(self) -> int: ...

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch, at least 1."""
        return max(1, self.num_samples // self.global_size)

    def size_of(self, step: int) -> int:
        """Return the number of sequences in a step."""
        return self.global_size


class TokenBatches(OfSamples):
    """Batches of an objective's samples. ``roles``: input -> the role that feeds it. ``size``: of the global batch."""

    def __init__(
        self, objective: Objective, inputs: Mapping[str, InputSpec], roles: Mapping[str, str], size: int, seed: int
    ) -> None:
        self.objective, self.roles, self.global_size, self.seed = objective, dict(roles), size, seed
        self._inputs = inputs
        self.stacked([objective.sample(0, 0)])

    @property
    def num_samples(self) -> int:
        return self.objective.num_samples

    def indices(self, step: int, rows: slice | None = None) -> list[tuple[int, int]]:
        """Return (epoch, index) of each row of a step's global batch, or of some of its rows."""
        return self._indices([step * self.global_size + row for row in range(self.global_size)[rows or slice(None)]])

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]:
        """Return the global batch of a step, or some of its rows: each input as [rows, *shape]."""
        return self.stacked([self.objective.sample(index, epoch) for epoch, index in self.indices(step, rows)])

    def samples(self, numbers: Sequence[int]) -> list[Mapping[str, np.ndarray]]:
        """Return the samples with these numbers in the order of training."""
        return [self.objective.sample(index, epoch) for epoch, index in self._indices(numbers)]

    def stacked(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Return each input as [samples, *shape]."""
        return stacked(samples, self.roles, self._inputs)

    def _indices(self, places: Sequence[int]) -> list[tuple[int, int]]:
        num_samples = self.objective.num_samples
        epochs, inside = np.divmod(np.asarray(places, np.int64), num_samples)
        indices = np.empty_like(inside)
        for epoch in np.unique(epochs).tolist():
            indices[epochs == epoch] = Permutation(num_samples, (self.seed, epoch))(inside[epochs == epoch])
        return list(zip(epochs.tolist(), indices.tolist(), strict=True))


def stacked(
    samples: Sequence[Mapping[str, np.ndarray]], roles: Mapping[str, str], inputs: Mapping[str, InputSpec]
) -> dict[str, Tensor]:
    """Return each input as [samples, *shape]. Raises PlanError if the samples lack a role."""
    for name, role in roles.items():
        if role not in samples[0]:
            what = f"the input {name!r} is fed by {role}, which this objective does not provide"
            fix = f"remove the input, or choose another data.objective; this one provides {', '.join(samples[0])}"
            raise PlanError(what, where=f"inputs.{name}", fix=fix)
    return {
        name: torch.from_numpy(np.stack([sample[role] for sample in samples])).to(getattr(torch, inputs[name].dtype))
        for name, role in roles.items()
    }


def make_objective(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """Return the objective ``data.objective``. Raises PlanError if the tokens have no sample for it.

    ``roles``: the roles that the model reads -> shapes. ``within``: sizes of the documents to take.
    """
    if tokens.is_supervised and data.objective != "next_token":
        what = f"{tokens.source} has samples with labels, and objective: {data.objective} chooses its own"
        raise PlanError(what, where="data.objective", fix="set objective: next_token")
    return OBJECTIVES[data.objective](tokens, length, data, seed, roles, within)


def token_batches(tokens: Tokens, spec: Spec, within: Within = ALL) -> TokenBatches:
    """Return batches of ``tokens`` by the spec's ``inputs``, ``data`` and ``seed``.

    ``within``: sizes of the documents to take. Raises PlanError if the tokens cannot feed the inputs.
    """
    inputs = spec.require_inputs()
    with spec.locating():
        roles = roles_of(inputs, spec.data.inputs)
        shapes = {role: inputs[name].sizes for name, role in roles.items()}
        length = length_of(inputs, roles, is_paired=tokens.is_paired)
        objective = make_objective(tokens, length, spec.data, spec.seed, shapes, within)
        return TokenBatches(objective, inputs, roles, spec.batch.global_size, spec.seed)


class Permutation:
    """A permutation of 0 … size - 1 by ``key`` (non-negative integers). Owns the keys of its rounds."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the permuted indices, int64 [k], at ``places`` (int64 [k], each below ``size``)."""
        permuted = self._network(places.astype(np.uint64))
        while (outside := permuted >= self.size).any():
            permuted[outside] = self._network(permuted[outside])
        return permuted.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return (left << self._half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return hashed values, each bit of which depends on every bit of a value (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


class Prefetched:
    """Batches that a thread makes ahead, for steps ``first`` to ``stop`` - 1 in order; any other is made on request.

    Owns the thread, which ``with`` starts. ``batch`` raises the error of the thread.
    """

    def __init__(self, batches: Batches, first: int, stop: int) -> None:
        self.batches, self._steps = batches, range(first, stop)
        # unlike queue.Queue, these two never make the caller wait for the GIL, which takes longer than making a batch
        self._ready: queue.SimpleQueue[dict[str, Tensor] | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._is_closed = False
        self._next = first
        self._thread = threading.Thread(target=self._make, name="batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True
        self._room.release()
        self._thread.join()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the global batch of a step."""
        if step != self._next or step not in self._steps or not self._thread.ident:
            return self.batches.batch(step)
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            raise batch
        self._next = step + 1
        self._room.release()
        return batch

    def _make(self) -> None:
        for step in self._steps:
            self._room.acquire()
            if self._is_closed:
                return
            try:
                self._ready.put(self.batches.batch(step))
            except BaseException as error:  # `batch` raises it
                self._ready.put(error)
                return


def roles_of(inputs: Collection[str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return input -> role. ``overrides``: the spec's ``data.inputs``. Raises PlanError for an unknown role."""
    for name in overrides:
        if name not in inputs:
            what = f"data.inputs has {name!r}, which is not an input"
            raise PlanError(what, where=f"data.inputs.{name}", fix=f"name one of: {', '.join(inputs)}")
    for name in inputs:
        if name not in overrides and name not in NAMES:
            raise PlanError(
                f"a text cannot feed the input {name!r}: its role is unknown",
                where=f"inputs.{name}",
                fix=f"set it with data: {{inputs: {{{name}: ROLE}}}}, ROLE one of {', '.join(ROLES)}; or call "
                "runtime.Engine with batches of your own",
            )
    return {name: overrides.get(name) or NAMES[name] for name in inputs}


def length_of(inputs: Mapping[str, InputSpec], roles: Mapping[str, str], *, is_paired: bool = False) -> int:
    """Return the number of tokens of one sequence.

    Raises PlanError for an input of another shape than its role has ([2, length] for pairs), or of another length.
    """
    lengths: dict[str, int] = {}
    for name, spec in inputs.items():
        shape = "[2, length]" if is_paired else SHAPES.get(roles[name], "[length]")
        wanted = shape.count(",") + (shape != "[]")
        is_other = is_paired and spec.shape[:1] != (2,)
        if len(spec.shape) != wanted or is_other or (wanted == 3 and len({1, *spec.sizes}) > 2):
            of = "a pair of samples" if is_paired else "a text"
            what = f"inputs.{name} has the shape {list(spec.shape)}; as {roles[name]} of {of} it needs {shape}"
            raise PlanError(what, where=f"inputs.{name}.shape", fix=f"give it the shape {shape}")
        if wanted and roles[name] != "cu_seqlens":
            lengths[name] = spec.sizes[-1]
    if len(set(lengths.values())) != 1:
        each = ", ".join(f"{name} {length}" for name, length in lengths.items())
        what = f"sequences of a text have one length, but the inputs differ: {each}"
        what = what if lengths else "no input is a sequence"
        raise PlanError(what, where="inputs", fix="give all of them the same length")
    return next(iter(lengths.values()))
