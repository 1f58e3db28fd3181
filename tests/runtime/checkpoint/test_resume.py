"""A save of one layout is loaded by another, and by the next: every value to the last bit, and the next five losses."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.saves import resolve
from tests.tools.laboratory import Case, Lab
from tests.tools.resumed import BEFORE, files_that_each_rank_reads, resume, stored, train_and_save

pytestmark = pytest.mark.slow
EIGHT = {"tp": 2, "pp": 2, "dp": 2}
BFLOAT16 = {"precision": {"parameters": "bfloat16"}}
FLOAT16 = {"precision": {"parameters": "float16", "loss_scale": "dynamic"}}
AVERAGED = {"optimizer": {"ema": 0.9}}
ZERO_OFF = {"optimizer": {"zero": 0}}
SMALL_BUCKETS = {"optimizer": {"bucket_size": 500, "alignment": "none"}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
FOLDED = {"pipeline": {"schedule": "zero_bubble_v"}}
DROPOUT = {"train": True}  # what pp and dp do not change
# the model, what all layouts share, the layouts one after another, each with what it alone has
CHAINS: dict[str, tuple[str, dict[str, Any], list[tuple[dict[str, int], dict[str, Any]]]]] = {
    "8 to 4 to 1, tied": ("gpt", {}, [(EIGHT, {}), ({"tp": 2, "dp": 2}, SMALL_BUCKETS), ({"dp": 1}, {})]),
    "tp to pp to dp": ("gpt", {}, [({"tp": 2}, {}), ({"pp": 2}, {}), ({"dp": 2}, SMALL_BUCKETS), ({"tp": 2}, {})]),
    "vpp": ("gpt", {}, [({"pp": 2, "vpp": 2}, INTERLEAVED), ({"dp": 2}, {}), ({"pp": 2}, {})]),
    "a v, tied": (
        "gpt2",
        {},
        [({"pp": 2, "vpp": 2}, FOLDED), ({"dp": 2}, {}), ({"tp": 2, "pp": 2, "vpp": 2}, FOLDED), ({"pp": 2}, {})],
    ),
    "ZeRO off and on": ("gpt", {}, [({"dp": 2}, ZERO_OFF), ({"dp": 2}, {}), ({"dp": 2, "tp": 2}, ZERO_OFF)]),
    "gradients and weights in shards": (
        "gpt2",
        {},
        [
            ({"dp": 2}, {"optimizer": {"zero": 3}}),
            ({"tp": 2, "dp": 2}, {"optimizer": {"zero": 2}}),
            ({"dp": 1}, {}),
            ({"pp": 2, "dp": 2}, {"optimizer": {"zero": 3}}),
        ],
    ),
    "shards within groups": (
        "frozen",
        {},
        [
            ({"dp": 4}, {"optimizer": {"zero": 3, "shard_group": 2}}),
            ({"tp": 2}, {}),
            ({"cp": 2, "dp": 2}, {"optimizer": {"zero": 2, "shard_group": 2}}),
        ],
    ),
    "a running mean": ("gpt", AVERAGED, [({"tp": 2, "pp": 2}, {}), ({"dp": 2}, {}), ({"dp": 1}, {})]),
    "half precision": ("gpt", BFLOAT16, [({"dp": 2}, {}), ({"tp": 2}, ZERO_OFF), ({"dp": 2}, SMALL_BUCKETS)]),
    "experts in half precision": (
        "experts",
        BFLOAT16,
        [({"dp": 2, "ep": 2}, {}), ({"tp": 2, "ep": 2, "etp": 1}, {}), ({"dp": 1}, {})],
    ),
    "experts with a loss scale": ("experts", FLOAT16, [({"dp": 2, "ep": 2}, {}), ({"dp": 2}, ZERO_OFF)]),
    "frozen and unused": ("frozen", {}, [({"tp": 2, "dp": 2}, {}), ({"pp": 2}, {}), ({"dp": 1}, {})]),
    "frozen, in shards": (
        "frozen",
        {},
        [({"dp": 2}, {"optimizer": {"zero": 3}}), ({"pp": 2}, {}), ({"tp": 2, "dp": 2}, {"optimizer": {"zero": 3}})],
    ),
    "one key head": ("falcon-7b", {}, [({"tp": 2}, {}), ({"dp": 2}, {}), ({"tp": 2, "dp": 2}, {})]),
    "cp to dp to tp": (
        "gpt2",
        {},
        [
            ({"cp": 2}, {}),
            ({"dp": 2}, SMALL_BUCKETS),
            ({"tp": 2}, {}),
            ({"cp": 2, "dp": 2}, {}),
            ({"cp": 2, "pp": 2}, ZERO_OFF),
        ],
    ),
    "frozen, cp": ("frozen", {}, [({"cp": 2, "dp": 2}, {}), ({"cp": 3}, {}), ({"tp": 2}, {})]),
    "experts": (
        "experts",
        {},
        [
            ({"dp": 4, "ep": 2}, {}),
            ({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, {}),
            ({"dp": 1}, {}),
            ({"dp": 2, "ep": 2}, {}),
        ],
    ),
    "dropout": ("gpt-dropout", DROPOUT, [({"tp": 2, "dp": 2}, {}), ({"tp": 2, "dp": 2}, {}), ({"tp": 2, "pp": 2}, {})]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHAINS)
def test_each_layout_goes_on_where_the_one_before_has_saved(lab: Lab, tmp_path: Path, name: str) -> None:
    model, shared, ((mesh, own), *others) = CHAINS[name]
    begin = Case(model, mesh, shared | own, job=train_and_save, job_arguments=(tmp_path / "0", name != "vpp"))
    unbroken = lab.run(begin)[0]
    truth = stored(tmp_path / "0")
    assert {kind for _, kind in truth} >= {"parameter", "exp_avg", "exp_avg_sq"}
    assert any(kind == "ema" for _, kind in truth) == (shared is AVERAGED)
    assert_written_once(resolve(tmp_path / "0"), truth)
    limit = 1e-2 if shared in (BFLOAT16, FLOAT16) else 1e-6
    for number, (mesh, own) in enumerate(others):
        where = (tmp_path / str(number), tmp_path / str(number + 1))
        resumed = lab.run(Case(model, mesh, shared | own, job=resume, job_arguments=where))
        assert [found["step"] for found in resumed] == [BEFORE] * len(resumed)
        assert [found["extra"] for found in resumed] == [{"position": [BEFORE, "epoch"]}] * len(resumed)
        assert_equal(stored(tmp_path / str(number + 1)), truth)
        assert_equal(resumed[0]["parameters"], unbroken["parameters"])
        assert resumed[0]["losses"] == pytest.approx(unbroken["losses"], rel=limit, abs=limit), mesh


def assert_equal(found: dict[Any, torch.Tensor], wanted: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def assert_written_once(save: Path, truth: dict[Any, torch.Tensor]) -> None:
    """The files hold as many bytes as the tensors do, beside their headers: no replica of anything."""
    held = 0
    for path in save.glob("*.safetensors"):
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
        held += path.stat().st_size - 8 - header
    assert held == sum(value.nbytes for value in truth.values())


@pytest.mark.thorough
def test_a_rank_opens_the_files_that_hold_what_it_owns(lab: Lab, tmp_path: Path) -> None:
    case = Case("llama", {"pp": 2, "dp": 2}, job=files_that_each_rank_reads, job_arguments=(tmp_path,))
    assert lab.run(case) == [[f"rank-{rank:05d}.safetensors"] for rank in range(4)]
