"""Layout strings and uneven splits: the oracle's cases, what other ways of saying it mean, and where errors point."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.fold import LOOP
from planner.pipeline.layout import (
    PATTERN,
    WORDS,
    by_stage,
    even_split,
    layout_of,
    layout_of_sizes,
    parse_layout,
    read_layout,
    spelled,
)
from planner.spec.sections import EvenSplit
from planner.spec.spec import Spec
from tests.tools.paths import ORACLES

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "pp_layout.json").read_text())
LAYOUTS, SPLITS = ORACLE["layout_strings"], ORACLE["stage_split"]
PARSED = [case for case in LAYOUTS if "error" not in case]
REFUSED_BY_US = {4: "multi-token prediction (m)", 18: "the first layer must be the embedding (E)"}


def by_id(case: dict) -> str:
    return str(case["id"])


def text_of(case: dict) -> str:
    return case["layout"] if isinstance(case["layout"], str) else spelled(case["layout"])


def pointed_at(error: PlanError) -> str:
    """The character above the caret."""
    _, text, pointer = error.what.split("\n")
    assert pointer.strip() == "^"
    return text[pointer.index("^")]


@pytest.mark.parametrize("case", PARSED, ids=by_id)
def test_stages_of_a_layout_equal_the_oracle(case):
    layout, pp, vpp = parse_layout(text_of(case)), case["pp"], case["vpp"]
    chunks = [[layout.stages[chunk * pp + rank] for chunk in range(vpp)] for rank in range(pp)]
    letters = [[[mark.letter for mark in stage] for stage in rank] for rank in chunks]
    assert letters == [[[WORDS[word] for word in stage] for stage in rank] for rank in case["stages_pp_then_vp"]]
    blocks = [[list(layout.blocks[chunk * pp + rank]) for chunk in range(vpp)] for rank in range(pp)]
    assert blocks == case["decoder_ids_pp_then_vp"]
    assert len(layout.stages) == pp * vpp


@pytest.mark.parametrize(
    "case", [case for case in PARSED if "validate" in case or case["id"] in REFUSED_BY_US], ids=by_id
)
def test_a_layout_is_refused_where_the_oracle_refuses_it(case):
    wrong = "error" in case.get("validate", {})
    if not wrong and case["id"] not in REFUSED_BY_US:
        assert layout_of(text_of(case), case["pp"], case["vpp"], case["num_layers"]).sizes == [
            len(case["decoder_ids_pp_then_vp"][stage % case["pp"]][stage // case["pp"]])
            for stage in range(case["pp"] * case["vpp"])
        ]
        return
    with pytest.raises(PlanError) as error:
        layout_of(text_of(case), case["pp"], case["vpp"], case.get("num_layers", 4))
    assert REFUSED_BY_US.get(case["id"], "") in error.value.what
    assert pointed_at(error.value)
    assert error.value.fix


@pytest.mark.parametrize("case", [case for case in LAYOUTS if "error" in case], ids=by_id)
def test_a_layout_that_the_oracle_cannot_read_is_refused_at_its_character(case):
    with pytest.raises(PlanError) as error:
        layout_of(case["layout"], case["pp"], 1, 2)
    assert pointed_at(error.value) == {"Et|t|L": "|", "E t | t L": " "}[case["layout"]]


@pytest.mark.parametrize("case", SPLITS, ids=by_id)
def test_an_even_split_equals_the_oracle(case):
    split = EvenSplit(
        first=case["num_layers_in_first_pipeline_stage"],
        last=case["num_layers_in_last_pipeline_stage"],
        embedding=case["account_for_embedding_in_pipeline_split"],
        loss=case["account_for_loss_in_pipeline_split"],
    )
    num_layers, pp, vpp = case["num_layers"], case["pp"], case["vpp"] or 1
    if "error" in case:
        with pytest.raises(PlanError) as error:
            even_split(num_layers, pp, vpp, LOOP, split)
        assert str(error.value.where) == "pipeline.split"
        assert error.value.fix
        return
    sizes = even_split(num_layers, pp, vpp, LOOP, split)
    assert sizes == case["layers_by_pp_then_vp"]
    blocks = layout_of(split, pp, vpp, num_layers).blocks
    assert [[blocks[c * pp + r].start for c in range(vpp)] for r in range(pp)] == case["offset_by_pp_then_vp"]
    assert [block for stage in blocks for block in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("split", "pp", "vpp", "sizes"),
    [
        ((3, 5), 2, 1, [3, 5]),
        (((3, 5),), 1, 2, [3, 5]),
        (((1, 2), (3, 2)), 2, 2, [1, 3, 2, 2]),
        ("Et*3|t*5L", 2, 1, [3, 5]),
        ("Et*3,|,t*5,L", 2, 1, [3, 5]),
        ("E|(tt|)*4L", 6, 1, [0, 2, 2, 2, 2, 0]),
        ("E((t|)*2t|)*2ttL", 7, 1, None),
        (EvenSplit(first=2), 3, 1, [2, 3, 3]),
        (EvenSplit(last=2, first=2), 4, 1, [2, 2, 2, 2]),
        (EvenSplit(embedding=True, loss=True), 5, 1, [1, 2, 2, 2, 1]),
        (EvenSplit(first=4), 2, 2, [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_ways_to_say_how_eight_blocks_are_dealt_out(split, pp, vpp, sizes):
    assert layout_of(split, pp, vpp, 8).sizes == (sizes or [1, 1, 1, 1, 1, 1, 2])


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("Et*3|xt|tL", 6, "`x` is not a layer"),
        ("Et*3|t*|tL", 7, "a number of repetitions must follow `*`"),
        ("Et*3|t*0|tL", 7, "a number of repetitions must follow `*`"),
        ("Et*", 3, "a number of repetitions must follow `*`"),
        ("E(tt|*3L", 2, "this bracket is never closed"),
        ("E(tt|)L", 6, "a number of repetitions must follow the bracket"),
        ("Ett|)*3L", 5, "this closing bracket has no opening one"),
        ("Et|m|tL", 4, "multi-token prediction (m)"),
        ("t|EtL", 1, "the first layer must be the embedding (E)"),
        ("Et|tLt", 6, "the last layer must be the loss (L)"),
        ("Et|t", 4, "the last layer must be the loss (L)"),
        ("EtE|tL", 3, "a second embedding (E)"),
        ("Et|L|L", 6, "a second loss (L)"),
        ("|Et|tL", 1, "the first stage is empty"),
        ("Et|tL|", 6, "the last stage is empty"),
        ("E(t*999|)*999999999L", 11, "more than 100000 layers and bars"),
        ("E((t*900|)*90|)*90L", 17, "more than 100000 layers and bars"),
        ("|", 1, "the first layer must be the embedding (E)"),
        (f"E{'t|' * 100}x{'t|' * 100}L", 202, "`x` is not a layer"),
    ],
)
def test_an_error_points_at_the_character(text, at, what):
    with pytest.raises(PlanError) as error:
        read_layout(text)
    assert f"pipeline.split: {what}" in error.value.what
    assert f"at character {at}\n" in error.value.what
    assert pointed_at(error.value) == text[at - 1]
    assert max(map(len, error.value.what.split("\n"))) < 120


@pytest.mark.parametrize(
    ("text", "pp", "vpp", "at", "what"),
    [
        ("Et|t|t|tL", 2, 1, 5, "has 4 stages, mesh.pp · mesh.vpp = 2 · 1 = 2"),
        ("Ett|ttL", 2, 2, 7, "has 2 stages, mesh.pp · mesh.vpp = 2 · 2 = 4"),
        ("Et*3|t*2L", 2, 1, 6, "has 5 blocks (t), but the model has 4"),
        ("Et|ttL", 2, 1, 6, "has 3 blocks (t), but the model has 4"),
    ],
)
def test_a_layout_of_other_stages_or_blocks_than_there_are_is_refused_at_its_character(text, pp, vpp, at, what):
    with pytest.raises(PlanError) as error:
        layout_of(text, pp, vpp, 4)
    assert error.value.what.startswith(f"pipeline.split {what}, at character {at}\n")
    assert pointed_at(error.value) == text[at - 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_sizes_become_a_layout_and_come_back(sizes):
    layout = layout_of_sizes(sizes)
    assert layout.sizes == sizes
    assert read_layout(layout.text) == layout
    assert re.search(PATTERN, layout.text)
    assert (layout.stage_of("E"), layout.stage_of("L")) == (0, len(sizes) - 1)
    pp = len(sizes)
    assert by_stage([[size] for size in layout_of(layout.text, pp, 1, sum(sizes)).sizes]) == sizes


@given(st.text(alphabet="EtmL|()*,019 x", min_size=1, max_size=14))
def test_any_text_is_a_layout_or_one_clear_error(text):
    error = error_of(text)
    assert pointed_at(error) in text if error else len(parse_layout(text).stages) == len(parse_layout(text).ends)


def error_of(text: str) -> PlanError | None:
    try:
        parse_layout(text)
    except PlanError as error:
        return error
    return None


def spec_of(split: object, mesh: dict | None = None) -> Spec:
    mesh = mesh or {"pp": 2, "vpp": 2}
    schedule = "interleaved_1f1b" if "vpp" in mesh else "1f1b"
    pipeline = {"schedule": schedule, "split": split}
    return Spec.load({"mesh": mesh, "batch": {"global": 8, "micro": 1}, "pipeline": pipeline})


@pytest.mark.parametrize(
    "split",
    [[1, 2, 3, 4], [[1, 2], [3, 4]], "Et|t|t|tL", [["embedding"], ["decoder"], [], ["loss"]], {"first": 4}, "auto"],
    ids=str,
)
def test_every_way_of_a_split_survives_a_round_trip(split):
    spec = spec_of(split)
    assert Spec.load(spec.to_dict()) == spec
    json.dumps(spec.to_dict())


@pytest.mark.parametrize(
    ("split", "what"),
    [
        ([[1, 2], [3]], r"pipeline.split \[\[1, 2\], \[3\]\] is not a list of 2 lists \(ranks\) of 2 numbers"),
        ([[1, 2]], "is not a list of 2 lists"),
        ([[1, 0], [1, 1]], r"pipeline.split.0.1 is 0, it must be at least 1"),
        ("Et|t|tL", "has 3 stages, mesh.pp · mesh.vpp = 2 · 2 = 4, at character 7"),
        ({"frist": 3}, "unknown key 'frist' in pipeline.split"),
        ({"first": 0}, "pipeline.split.first is 0, it must be at least 1"),
        ({"first": 3, "loss": True}, "count as blocks only if first and last are not given"),
        ([["embedding", "decodr"], ["loss"]], "pipeline.split.0.1 is the string 'decodr'"),
        ([["embedding", 3], ["loss"]], "pipeline.split.0.1 is 3"),
        ([["embedding"], "loss"], "pipeline.split.1 is the string 'loss'"),
        ("", "must be"),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_is_one_error_when_the_spec_is_read(split, what):
    with pytest.raises(PlanError, match=what) as error:
        spec_of(split)
    assert str(error.value.where).startswith("pipeline.split")
    assert error.value.fix
