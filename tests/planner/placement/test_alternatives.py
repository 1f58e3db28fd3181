"""The cost of one parameter in each style: the plan's own is the cheapest, and impossible ones say why."""

import pytest

from passes.errors import PlanError
from planner import Plan
from planner.report.alternatives import why as sections_of
from planner.report.section import Section
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

OVERRIDES = {"overrides": {"*.mlp.c_fc": "replicate"}, "vocabulary_multiple": 8}


def planned(name: str, **keys: object) -> Plan:
    return plan_again(build(name), spec_of(name, **{"mesh": {"tp": 2}, **keys}))


def why(made: Plan, name: str) -> list[Section]:
    return sections_of(made, made.to_run()[0], name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_the_chosen_style_is_the_cheapest(name: str) -> None:
    made = planned(name)
    sections = [section for row in made.parameters[:12] for section in why(made, row.name)]
    assert len(sections) == 12
    for row, section in zip(made.parameters, sections, strict=False):
        style, cost, *_, reason = section.rows[0]
        assert (style, cost, reason) == (row.style, "1.00", f"chosen: {row.reason}")
        assert all(float(cost) >= 1 for _, cost, *_ in section.rows if cost)


def test_an_override_is_shown_beside_the_style_that_it_excludes() -> None:
    (section,) = why(planned("gpt2", tensor_parallel=OVERRIDES), "*.h.*.mlp.c_fc.weight")
    rows = {style: (cost, reason) for style, cost, *_, reason in section.rows}
    assert rows["column"] == ("1.00", "")
    assert float(rows["replicate"][0]) > 1
    assert rows["replicate"][1] == "chosen: override: replicate"
    assert rows["vocab"] == ("", "not possible: it is not a vocabulary table")


def test_blocks_that_are_alike_are_one_table() -> None:
    made = planned("gpt2")
    assert [section.title.split(" [")[0] for section in why(made, "*.mlp.c_*.weight")] == [
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
    ]
    assert made.why("transformer.h.1.mlp.c_fc.weight").startswith("transformer.h.1.mlp.c_fc.weight [")


def test_without_tensor_parallelism_nothing_is_weighed() -> None:
    made = planned("gpt2", mesh={})
    (section,) = why(made, "transformer.wte.weight")
    assert [row[0] for row in section.rows] == ["replicate"]
    assert section.rows[0][-1].endswith("tp = 1")


def test_a_name_of_nothing_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(PlanError) as caught:
        planned("gpt2", mesh={}).why("transformer.h.0.mlp.c_fc.weigth")
    assert "did you mean transformer.h.0.mlp.c_fc.weight?" in str(caught.value)
