"""The parts of benchmarks/gpu.py: their arithmetic, and every line of them that a CPU can run."""

import re
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import main
from benchmarks.on_gpu import dropout, equal, half, layers, nccl, profile, rounding, shared
from benchmarks.on_gpu.table import Table, section
from passes.ops.random_state import RandomState
from runtime.distributed.meeting import Seat, judge
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

SMALL = ("equal", "sync", "dropout", "graphs", "profile", "plain", "shared")  # on a GPU a minute each, at most
QUICK = "layers"  # a part that times, compares and writes tables as the others do
WITH_RANKS = ("nccl", "shared", "sharded")
CPU = torch.device("cpu")
AT_ONCE = 0.01  # seconds, too few for any part
LONGEST = 2000  # characters of a command


def case(part: str) -> object:
    marks = [pytest.mark.slow] * (part in WITH_RANKS) + [pytest.mark.thorough] * (part != QUICK)
    return pytest.param(part, marks=marks)


@pytest.mark.parametrize("part", [*gpu.PARTS, "all"])
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([part]) == 2
    seen = capsys.readouterr()
    assert seen.err.count("\n") == 1
    assert "no CUDA device" in seen.err
    assert not seen.out


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["latency"])
    assert ended.value.code == 2


@pytest.mark.thorough
@pytest.mark.parametrize("part", [case(part) for part in gpu.PARTS])
def test_a_part_runs_on_a_cpu_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    assert main([part, "--device", "cpu", "--tiny", "--results", str(tmp_path)]) == 0
    written = (tmp_path / f"{part}.md").read_text()
    assert written.startswith(f"\n### On a GPU: {part}")
    assert written in capsys.readouterr().out
    assert "FAILED" not in written


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_case_of_ranks_equals_one_process(size: int) -> None:
    names = [name for name, case in nccl.CASES.items() if case.size == size]
    table = nccl.layouts(names, "gloo", CPU, tiny=False)
    assert len(table.rows) == len(names)
    assert not table.failed


@pytest.mark.thorough
@pytest.mark.parametrize("way", half.ways(CPU, tiny=False))
def test_every_way_to_run_a_step_keeps_to_the_rounding_of_one_process(way: str) -> None:
    assert not half.steps(CPU, tiny=True, names=[way]).failed


@pytest.mark.thorough
@pytest.mark.parametrize("family", half.FAMILIES)
def test_every_family_over_ep_keeps_to_the_rounding_of_one_process(family: str) -> None:
    assert not half.over_ep(CPU, (family,)).failed


@pytest.mark.thorough
def test_a_part_in_a_process_of_its_own_leaves_its_tables_and_its_log(tmp_path: Path) -> None:
    given = gpu.parsed(["dropout", "--device", "cpu", "--tiny", "--results", str(tmp_path)])
    assert gpu.run_process("dropout", HANG_SECONDS, given) == ""
    assert "| bfloat16 |" in (tmp_path / "dropout.md").read_text()
    assert "dropout: bfloat16 |" in (tmp_path / "dropout.log").read_text()


def test_the_exit_code_is_that_of_the_first_part_that_broke_and_all_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("half", "dropout"):
        monkeypatch.setitem(gpu.PARTS, part, AT_ONCE)
    assert main(["dropout", "half", "--device", "cpu", "--tiny"]) == 11
    assert re.search("broken: half: no end within .*; dropout: no end within", capsys.readouterr().err)
    assert main(["dropout", "half", "--device", "cpu", "--tiny", "--seconds", str(AT_ONCE)]) == gpu.LATE
    assert "time was up before half, dropout" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
def test_after_an_error_of_ranks_the_cases_behind_it_get_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = nccl.Case(2, "a model that is not there", {"tp": 2})
    monkeypatch.setattr(nccl, "CASES", {"a": bad, "b": bad})
    found = nccl.of_ranks(["a", "b"], 2, "gloo", "cpu")
    assert list(found) == ["a", "b"]
    assert all("KeyError" in str(told) for told in found.values())


@pytest.mark.parametrize(
    ("gpu_name", "file"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("Tesla T4", "h200"),
        ("", "h200"),
    ],
)
def test_the_cluster_file_is_that_of_the_gpu(gpu_name: str, file: str) -> None:
    assert Path(profile.cluster_of(gpu_name)).stem == file


def test_kernels_have_their_kinds() -> None:
    kinds = {
        "nvjet_tst_128x256_64x6_2x1_v_bz_TNN": "products",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
        "triton_poi_fused_cat_mul_3": "elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
        "void at::native::elementwise_kernel<direct_copy_kernel_cuda>": "moves",
        "Memcpy DtoD (Device -> Device)": "moves",
        "aten::mm": "products",
    }
    assert {name: layers.kind_of(name) for name in kinds} == kinds


def test_an_error_is_in_parts_of_the_truth_and_of_the_own_one() -> None:
    truth = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.zeros(1).double()}
    assert rounding.error({"a": torch.tensor([3.0, 3.0])}, truth) == pytest.approx(0.2)
    table = Table("half", ("a",))
    rounding.hold(table, "fine", 0.15, 0.1)
    rounding.hold(table, "wrong", 0.16, 0.1)
    rounding.hold(table, "no values", nan, 0.1)
    assert [what.partition(":")[0] for what in table.failed] == ["wrong", "no values"]


def test_the_page_calls_every_part_in_commands_that_are_not_too_long() -> None:
    page = (ROOT / "benchmarks/on_gpu/README.md").read_text()
    commands = [text.replace("\\\n", "") for text in re.findall("```bash\n(.*?)```", page, re.DOTALL)]
    called = " ".join(re.findall(r"benchmarks/gpu\.py ([a-z ]+)--", " ".join(commands))).split()
    assert called == list(gpu.PARTS)
    assert all(len(command) <= LONGEST for command in commands)


@pytest.mark.parametrize("mesh", shared.LAYOUTS, ids=str)
def test_ranks_that_share_a_gpu_on_purpose_may_run_each_layout(mesh: dict[str, int]) -> None:
    seat = Seat("host", "cuda:0", gpu="the only one", named=True)
    assert judge([seat, seat], mesh.get("pp", 1)).backend == "gloo"


@pytest.mark.gpu
@pytest.mark.parametrize("part", SMALL)
def test_a_part_is_within_reach_on_a_gpu(part: str) -> None:
    assert main([part, "--tiny"]) == 0


def test_what_breaks_off_or_is_wrong_has_the_exit_code_of_its_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dropout, "FACTOR_LIMIT", -1.0)
    assert main(["dropout", "--device", "cpu", "--tiny"]) == gpu.code_of("dropout") >= gpu.FIRST
    assert "FAILED bfloat16, factor" in capsys.readouterr().out
    monkeypatch.setattr(dropout, "factor_and_zeros", lambda *_: 1 / 0)
    assert main(["dropout", "--device", "cpu", "--tiny"]) == gpu.code_of("dropout")
    assert "dropout broke off" in capsys.readouterr().err


def test_a_forecast_that_missed_is_noted_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("dropout", ("a",))
    table.add(1)
    table.expect("memory", 1.2, 1.1)
    monkeypatch.setattr(dropout, "run", lambda *_, **__: [table])
    assert main(["dropout", "--device", "cpu"]) == 0
    assert "MISSED memory: 1.2, at most 1.1" in capsys.readouterr().out


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
    of_cudnn, of_flash = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "void pytorch_flash::flash_fwd_kernel<…>"
    assert profile.attention_kernels([of_cudnn]) == "cudnn"
    assert profile.attention_kernels([of_flash, "gemm", of_cudnn]) == "cudnn, flash"
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
