"""Streams of weights on processes: bits equal for every reader, two buckets of memory, gone readers."""

import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from passes.errors import PlanError
from runtime import Engine
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS

Batches = list[dict[str, Tensor]]
BUCKET_BYTES = 40_000


class Streamed(NamedTuple):
    """``wrong``: names of tensors that differ, by the reader. ``most``: bytes of yielded tensors that lived at once.

    ``taken``: of each reader, whether it took all. ``losses``: of later steps.
    """

    wrong: dict[str, list[str]]
    num_tensors: int
    most: int
    taken: list[bool]
    warned: list[str]
    losses: list[float]


class Living:
    """Counts the bytes of tensors that are alive, each once by its memory."""

    def __init__(self) -> None:
        self.refs: list[tuple[weakref.ref[Tensor], int, int]] = []
        self.most = 0

    def see(self, bucket: dict[str, Tensor]) -> None:
        for tensor in {id(t): t for t in bucket.values()}.values():
            self.refs.append((weakref.ref(tensor), tensor.untyped_storage().data_ptr(), tensor.nbytes))
        self.refs = [entry for entry in self.refs if entry[0]() is not None]
        self.most = max(self.most, sum(size for _, _, size in self.refs))


def streamed(plan: Any, batches: Batches, directory: str) -> Streamed:
    """Weights after a step, to a loop, a directory, a function, and one that fails."""
    is_first, living = dist.get_rank() == 0, Living()
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        parameters = engine.gather_parameters()
        seen: dict[str, Tensor] = {}
        for bucket in engine.stream_weights(bucket_bytes=BUCKET_BYTES, names="all"):
            living.see(bucket)
            seen |= {name: value.clone() for name, value in bucket.items()}
        wrong = {"loop": differing(seen, parameters)}
        taken = [engine.stream_weights(directory, bucket_bytes=BUCKET_BYTES)]
        if is_first:
            wrong["directory"] = differing(files_of(Path(directory)), parameters, all_names=False)
        collected: dict[str, Tensor] = {}
        taken.append(engine.stream_weights(lambda bucket: collected.update(bucket), bucket_bytes=BUCKET_BYTES))
        wrong["function"] = differing(collected, parameters, all_names=False)
        calls: list[int] = []

        def failing(bucket: dict[str, Tensor]) -> None:
            calls.append(len(bucket))
            if len(calls) == 2:
                raise ConnectionError("the server is gone")

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            taken.append(engine.stream_weights(failing, bucket_bytes=BUCKET_BYTES))
        warned = [str(w.message) for w in found if "reader" in str(w.message)]
        assert len(calls) == (2 if is_first else 0)
        for _ in engine.stream_weights(bucket_bytes=BUCKET_BYTES):
            break  # the others' shards are taken to the end
        with pytest.raises(PlanError, match="the call of stream_weights differs between ranks: rank 1 of"):
            engine.stream_weights(bucket_bytes=BUCKET_BYTES + (dist.get_rank() == 1))
        losses = [engine.train_step(batch).loss for batch in batches[1:]]
    return Streamed(wrong, len(seen), living.most, taken, warned, losses)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], *, all_names: bool = True) -> list[str]:
    absent = expected.keys() - found.keys() if all_names else set()
    extra = found.keys() - expected.keys()
    return [*absent, *extra, *(n for n in found.keys() & expected.keys() if not found[n].equal(expected[n]))]


def files_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    assert (directory / "model.safetensors.index.json").exists()
    for path in files:
        found |= load_file(path)
    return found


CASES = {
    "tp 2, pp 2": ("gpt", {"tp": 2, "pp": 2}, {}),
    "weights in shards over dp": ("gpt", {"dp": 2}, {"optimizer": {"zero": 3}}),
    "experts": ("experts", {"tp": 2}, {}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_reader_gets_the_weights_to_the_bit(lab: Lab, tmp_path: Path, case: str) -> None:
    model, mesh, rest = CASES[case]
    job = Case(model, mesh, rest, job=streamed, job_arguments=(str(tmp_path / "weights"),))
    first, *others = lab.run(job)
    assert all(not names for found in (first, *others) for names in found.wrong.values()), first.wrong
    assert first.num_tensors > 20
    assert 0 < first.most <= 2 * BUCKET_BYTES
    assert first.taken == [True, True, False]
    assert len(first.warned) == 1
    assert "training continues: ConnectionError: the server is gone" in first.warned[0]
    for found in others:
        assert (found.num_tensors, found.taken, found.warned) == (0, [True, True, False], [])
        assert found.losses == first.losses
