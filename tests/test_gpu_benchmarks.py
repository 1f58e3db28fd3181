"""The parts of benchmarks/gpu.py: their arithmetic, and every line of them that a CPU can run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import dropout, equal, profile, shared
from benchmarks.on_gpu.table import Table, section
from passes.ops.random_state import RandomState
from runtime.distributed.meeting import Seat, judge
from tests.tools.paths import ROOT

PARTS = ("equal", "sync", "dropout", "graphs", "profile", "plain")
CPU = torch.device("cpu")


def main() -> Callable[[list[str]], int]:
    return runpy.run_path(str(ROOT / "benchmarks/gpu.py"))["main"]


@pytest.mark.parametrize("part", [*PARTS, "shared", "all"])
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main()([part]) == 2
    seen = capsys.readouterr()
    assert seen.err.count("\n") == 1
    assert "no CUDA device" in seen.err
    assert not seen.out


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main()(["latency"])
    assert ended.value.code == 2


@pytest.mark.thorough
@pytest.mark.parametrize("part", [*PARTS, pytest.param("shared", marks=pytest.mark.slow)])
def test_a_part_runs_on_a_cpu_and_appends_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n")
    assert main()([part, "--device", "cpu", "--tiny", "--write", "--results", str(results)]) == 0
    written = results.read_text()
    assert written.startswith(f"# Results\n\n## On a GPU: {part}\n")
    assert written.removeprefix("# Results\n") in capsys.readouterr().out
    assert "FAILED" not in written


@pytest.mark.parametrize("mesh", shared.LAYOUTS, ids=str)
def test_ranks_that_share_a_gpu_on_purpose_may_run_each_layout(mesh: dict[str, int]) -> None:
    seat = Seat("host", "cuda:0", gpu="the only one", named=True)
    assert judge([seat, seat], mesh.get("pp", 1)).backend == "gloo"


@pytest.mark.gpu
@pytest.mark.parametrize("part", [*PARTS, "shared"])
def test_a_part_is_within_reach_on_a_gpu(part: str) -> None:
    assert main()([part, "--tiny"]) == 0


def test_what_breaks_off_or_is_out_of_reach_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dropout, "FACTOR_LIMIT", -1.0)
    assert main()(["dropout", "--device", "cpu", "--tiny"]) == 1
    assert "FAILED bfloat16, factor" in capsys.readouterr().out
    monkeypatch.setattr(dropout, "factor_and_zeros", lambda *_: 1 / 0)
    assert main()(["dropout", "--device", "cpu", "--tiny"]) == 1
    assert "dropout broke off" in capsys.readouterr().err


def test_a_table_holds_what_is_within_reach_and_no_nan() -> None:
    table = Table("equal", ("a", "b", "c"))
    table.add(True, 0.123456, None)
    for value in (1.0, 1.1, nan):
        table.hold(f"{value}", value, 1.0)
    assert table.failed == ["1.1: 1.1, at most 1", "nan: nan, at most 1"]
    assert table.markdown().startswith("| a | b | c |\n| --- | --- | --- |\n| yes | 0.1235 | - |\n\nFAILED 1.1")
    assert f"torch {torch.__version__}" in section(table, CPU, 3.2)


def test_gaps_are_what_no_interval_covers() -> None:
    assert profile.idle_percent([]) is None
    assert profile.idle_percent([(2.0, 4.0)]) == 0.0
    assert profile.idle_percent([(6.0, 10.0), (0.0, 2.0), (1.0, 4.0), (1.5, 1.6)]) == pytest.approx(20.0)


def test_flops_of_a_token_are_six_for_each_weight_and_half_a_square_of_scores() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8}
    forward = 2 * 100 + 2 * (2 * 2 * 8 * 16 / 2)  # products; two of them over 16 keys, of which half are seen
    assert profile.flops_a_token(100, sizes, 16) == 3 * forward
    assert profile.percent(3.0, 12.0) == 25.0
    assert profile.percent(3.0, None) is None


def test_attention_is_known_by_its_kernels() -> None:
    assert profile.attention_kernels(["void pytorch_flash::flash_bwd_kernel<…>", "gemm"]) == "flash"
    assert profile.attention_kernels(["cudnn_generated_fort_native_sdpa_sm90_flash_fprop"]) == "flash, cudnn"
    assert profile.attention_kernels(["gemm", "softmax"]) is None


def test_a_difference_is_in_parts_of_the_largest_element() -> None:
    truth, found = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])
    assert equal.relative(found, truth) == 0.25
    assert equal.relative(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert equal.relative(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert equal.worst({"a": truth, "b": found}, {"a": truth, "b": truth}) == (0.25, "b")


def test_runs_that_differ_are_out_of_reach() -> None:
    one, other = torch.ones(2), torch.full((2,), 1.1)
    table = Table("equal", ("model", "loss", "gradients", "worst gradient", "parameters", "worst parameter"))
    equal.compare(table, "gpt2", equal.Run(2.0, {"w": other}, {"w": one}), equal.Run(2.1, {"w": one}, {"w": one}))
    assert [what.partition(":")[0] for what in table.failed] == ["gpt2, loss", "gpt2, gradients"]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda self, draw: 7, "the same: tp ranks inside"),
        (lambda self, draw: self.tp_rank, "not the same: tp ranks outside"),
    ],
)
def test_masks_that_depend_on_the_layout_are_seen(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., int], seen: str
) -> None:
    assert dropout.wrong_masks(CPU, torch.bfloat16) == []
    monkeypatch.setattr(RandomState, "stream_seed", change)
    assert seen in dropout.wrong_masks(CPU, torch.bfloat16)
