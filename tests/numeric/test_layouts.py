"""Four families on every layout: loss, every gradient and three clipped updates are those of one process."""

from typing import Any

import pytest

from planner.pipeline.layout import layout_of
from tests.tools.laboratory import Case, Lab, name_of

LAYOUTS = [
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"dp": 2},
    {"dp": 4},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
]


# A plain model and a tied one on each; another family on every second of them.
CASES = [(model, layout) for model in ("gpt", "gpt2") for layout in LAYOUTS]
CASES += [("llama", layout) for layout in LAYOUTS[::2]] + [("bert", layout) for layout in LAYOUTS[1::2]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "layout"), CASES, ids=name_of)
def test_layout_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "gpt2"])
def test_one_rank_needs_no_launcher_and_equals_one_process(lab: Lab, model: str) -> None:
    assert lab.check(Case(model, {"dp": 1}, micro=2)).wrong == []


DATA: dict[str, Any] = {"tp": 2, "dp": 2}
STAGES = {"tp": 2, "pp": 2}
SETTINGS = {
    **{
        f"{kind}, microbatches of {micro}": Case("gpt", STAGES, {"pipeline": {"schedule": kind}}, 8, micro)
        for kind in ("gpipe", "1f1b")
        for micro in (1, 2)
    },
    "depth that pp does not divide": Case("gpt-5-layers", {"tp": 2, "pp": 4}),
    **{f"padded to {n}": Case("gpt", STAGES, {"tensor_parallel": {"vocabulary_multiple": n}}) for n in (1, 128)},
    "not clipped": Case("gpt", DATA, {"optimizer": {"clip_grad_norm": None}}),
    "no decay": Case("gpt", DATA, {"optimizer": {"weight_decay": 0.0}}),
    "not aligned": Case("gpt", DATA, {"optimizer": {"alignment": "none"}}),
    "small buckets": Case("gpt", DATA, {"optimizer": {"bucket_size": 1000}}),
    **{order: Case("gpt", DATA | {"order": order}) for order in ("dp-tp-cp-ep-pp", "cp-ep-dp-tp-pp")},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_equal_one_process(lab: Lab, name: str) -> None:
    assert lab.check(SETTINGS[name]).wrong == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_sequences", [2, 3])
def test_fewer_microbatches_than_stages_equal_one_process(lab: Lab, schedule: str, num_sequences: int) -> None:
    case = Case("gpt", {"pp": 4}, {"pipeline": {"schedule": schedule}}, num_sequences, micro=1)
    warnings = [row.what for row in lab.plan(case).diagnostics if row.level == "warning"]
    assert [what for what in warnings if "not fill a pipeline of 4 ranks" in what and "(bubble)" in what]
    assert lab.check(case).wrong == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split", [[1, 3], [3, 1]])
def test_uneven_split_equals_one_process(lab: Lab, split: list[int]) -> None:
    case = Case("gpt", {"pp": 2, "dp": 2}, {"pipeline": {"split": split}})
    assert [len(stage.blocks) for stage in lab.plan(case).stages] == split
    assert lab.check(case).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "mesh", "split"),
    [
        ("gpt", {"pp": 2}, "Et*4|L"),
        ("gpt", {"tp": 2, "pp": 2}, "E|t*4L"),
        ("gpt", {"pp": 2, "vpp": 2}, "E|t*2|t*2|L"),
        ("gpt", {"pp": 2, "vpp": 2, "dp": 2}, "E||t*4|L"),
        ("gpt2", {"pp": 4}, "E|{}||L"),
        ("bert", {"tp": 2, "pp": 2, "vpp": 2}, "E|{}||L"),
        ("llama", {"pp": 2, "vpp": 2}, "E|{}||L"),
        ("t5", {"pp": 4}, "E|{}||L"),
    ],
    ids=str,
)
def test_stages_without_blocks_equal_one_process(lab: Lab, model: str, mesh: dict[str, int], split: str) -> None:
    num_blocks = sum(len(stage.blocks) for stage in lab.plan(Case(model, {"dp": 1})).stages)
    schedule = "interleaved_1f1b" if "vpp" in mesh else "1f1b"
    text = split.format(f"t*{num_blocks}")
    case = Case(model, mesh, {"pipeline": {"schedule": schedule, "split": text}}, 8, 1)
    assert [len(stage.blocks) for stage in lab.plan(case).stages] == layout_of(
        text, 1 + text.count("|"), 1, num_blocks
    ).sizes
    assert lab.check(case).wrong == []


@pytest.mark.thorough
def test_tied_embedding_on_two_stages_stays_one_parameter(lab: Lab) -> None:
    case = Case("gpt", {"tp": 2, "pp": 2})
    tied = next(p for p in lab.plan(case).parameters if p.name == "tokens.weight")
    assert tied.stages == (0, 1)
    assert tied.aliases == ("head.weight",)


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gpt", "gpt2-257", "llama-tied"])
def test_vocabulary_that_does_not_divide_is_padded_and_equals_one_process(lab: Lab, model: str) -> None:
    case = Case(model, {"tp": 4})
    table = next(p for p in lab.plan(case).parameters if p.style == "vocab")
    assert table.shape[0] % 4
    assert table.local_shape[0] * 4 > table.shape[0]
    assert lab.check(case).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}], ids=name_of)
def test_override_to_replicate_equals_one_process(lab: Lab, layout: dict[str, int]) -> None:
    case = Case(
        "gpt",
        layout,
        {"tensor_parallel": {"vocabulary_multiple": 8, "overrides": {"*.mlp.*": "replicate", "tokens": "replicate"}}},
    )
    styles = {p.name: p.style for p in lab.plan(case).parameters}
    assert styles["blocks.0.mlp.up.weight"] == styles["tokens.weight"] == "replicate"
    assert lab.check(case).wrong == []
