"""What a search cannot do is one error: what, at which line of the spec, and what helps."""

from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from planner.cluster.cluster import Cluster, read_cluster
from planner.search.search import search
from planner.spec.spec import Spec
from tests.models.deep import captured, spec_of

BASE = read_cluster("dgx-a100")


def found(name: str = "gpt2", cluster: Cluster = BASE, **keys: Any):
    return search(captured(name), spec_of(name, **{"batch": {"global": 16}, **keys}), cluster, top=3)


@pytest.mark.parametrize(
    ("keys", "what", "where", "fix"),
    [
        ({"devices": 1 << 19}, "devices = 524288, but the cluster dgx-a100 has", "devices", "name a larger cluster"),
        (
            {"devices": 8, "mesh": {"tp": 3, "pp": 2, "dp": "auto"}},
            "tp 3 · pp 2 = 6 does not divide the 8 devices",
            "mesh.tp",
            "leave one to auto",
        ),
        (
            {"devices": 8, "mesh": {"tp": 2, "dp": 2, "vpp": "auto"}},
            "tp 2 · dp 2 = 4 leave 4 of 8 devices idle",
            "mesh.tp",
            "set devices: 4",
        ),
        (
            {"devices": 12, "mesh": {"tp": "auto", "dp": 3}},
            "not divisible by mesh.dp = 3",
            "batch.global",
            "change one",
        ),
        ({"devices": 13}, "no layout uses all 13 devices", "devices", "use 12 or 16 devices"),
        (
            {"devices": 8, "mesh": {"tp": 8, "pp": "auto"}},
            "4 query heads not divisible by tp = 8",
            "",
            "choose tp from",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_told_with_what_helps(keys: dict[str, Any], what: str, where: str, fix: str):
    with pytest.raises(PlanError) as caught:
        found(**keys)
    assert what in caught.value.what
    assert where in str(caught.value.where)
    assert fix in caught.value.fix


def test_an_error_names_the_line_of_the_spec(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("mesh: {tp: 3, dp: auto}\nbatch: {global: 16}\ncluster: dgx-a100\ndevices: 8\n")
    with pytest.raises(PlanError, match="tp 3 = 3 does not divide") as caught:
        search(captured("gpt2"), Spec.load(path), BASE)
    assert str(caught.value.where) == "spec.yaml:1"


@pytest.mark.thorough
def test_a_model_that_fits_nowhere_says_on_how_many_devices_it_would():
    device = BASE.device.model_copy(update={"memory": 370_000, "context": None})
    links = tuple(
        link.model_copy(update={"devices": n, "communicator": None}) for link, n in zip(BASE.links, (2, 4), strict=True)
    )
    small = BASE.model_copy(update={"device": device, "links": links})
    with pytest.raises(PlanError, match="the model fits no layout of 4 devices") as caught:
        found(cluster=small)
    assert "the smallest, tp" in caught.value.what
    needs, has = caught.value.what.partition("needs ")[2].split(" of ")[:2]
    assert float(needs.split()[0]) >= float(has.split()[0])
    number = int(caught.value.fix.split()[1])

    def of(devices: int) -> Any:
        more = links[-1].model_copy(update={"devices": devices})
        return found(cluster=small.model_copy(update={"links": (*links[:-1], more)}), batch={"global": 16})

    assert of(number).best
    with pytest.raises(PlanError):  # a node less
        of(number - 2)


def test_what_is_considered_is_estimated_or_ruled_out_with_a_reason():
    result = found(devices=8)
    assert len(result.best) == 3
    not_estimated = [count for reason, count in result.pruned.items() if not reason.startswith("estimated")]
    assert result.num_considered == result.num_estimated + sum(not_estimated)
    assert all(loser.why for loser in result.losers)
    axes = {loser.choice.split()[0] for loser in result.losers}
    assert {"tp", "pp", "recompute", "micro"} <= axes
    assert {what for _, what in result.refused} == {"attention: 4 query heads not divisible by tp = 8"}
