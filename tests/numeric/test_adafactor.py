"""Adafactor trains as torch's does on whole parameters: matrices, stacks of experts and vectors, on every layout."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner import Plan, PlanError, plan
from runtime import Engine
from runtime.checkpoint.saves import read_step, resolve
from runtime.optimizer.factored import FactoredRule
from tests.models import families
from tests.models.experts import VOCABULARY, Net
from tests.models.stacked_experts import Stacks, biased
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.optimizer_ranks import spec_of, trained

STEPS = 20
# the bias of keys has no gradient but rounding: a greater bound of mean squares than float64's keeps its update small
RULE = {
    "name": "adafactor",
    "lr": 1e-2,
    "weight_decay": 0.1,
    "clip_grad_norm": 1.0,
    "options": {"eps": [1e-7, 1e-3], "beta2_decay": -0.7, "d": 1.1},
}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "tp2, sequence parallel": {"mesh": {"tp": 2}, **SEQUENCE},
    "dp2": {"mesh": {"dp": 2}},
    "dp4, small buckets": {"mesh": {"dp": 4}, "optimizer": {"bucket_size": 3000, "alignment": "none"}},
    "tp2·dp2": {"mesh": {"tp": 2, "dp": 2}},
    "tp2·dp2, zero 0": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 0}},
    "tp2·dp2, zero 2": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 2}},
    "tp2·dp2, zero 3": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 3}},
    "dp4, in groups": {"mesh": {"dp": 4}, "optimizer": {"shard_group": 2}},
    "pp2·dp2": {"mesh": {"pp": 2, "dp": 2}},
    "cp2·tp2": {"mesh": {"cp": 2, "tp": 2}},
    "tp2, dynamic scale": {"mesh": {"tp": 2}, "precision": {"parameters": "float64", "loss_scale": "dynamic"}},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "ep2·dp2": {"mesh": {"ep": 2, "dp": 2}},
    "ep2·dp2, zero 0": {"mesh": {"ep": 2, "dp": 2}, "optimizer": {"zero": 0}},
    "ep2·dp2·tp2, etp 1": {"mesh": {"ep": 2, "dp": 2, "tp": 2, "etp": 1}},
    "ep2·dp2·tp2, etp 2": {"mesh": {"ep": 2, "dp": 2, "tp": 2, "etp": 2}},
    "tp2·dp2": {"mesh": {"tp": 2, "dp": 2}},
}


def stacks() -> families.Entry:
    """Stacks [E, a, b] and stacks of biases [E, b], which torch takes for one matrix."""
    torch.manual_seed(5)
    layer = Stacks(biased)
    del layer.shared
    return families.Entry(Net(layer).double(), families.tokens(VOCABULARY, length=8))


def build(name: str) -> families.Entry:
    return stacks() if name == "stacks" else families.build(name)


def alone(name: str, rule: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    entry = build(name)
    model, losses = entry.model, []
    options = {"lr": rule["lr"], "weight_decay": rule["weight_decay"], **rule.get("options", {})}
    update = torch.optim.Adafactor(model.parameters(), **options)
    for step in range(STEPS):
        update.zero_grad()
        loss = entry.loss(model(**entry.batch(8, step)))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
    return losses, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


def both(host: Any, name: str, layout: dict[str, Any], rule: dict[str, Any]) -> Any:
    found, decided = trained(host, build(name), layout, rule, "float64", STEPS)
    return found, alone(name, rule), decided.memory[0].optimizer


def check(name: str, layout: dict[str, Any], rule: dict[str, Any] = RULE) -> None:
    (losses, found, measured), (wanted, truth), planned = session_lab().call(both, name, layout, rule)
    assert losses == pytest.approx(wanted, rel=1e-10)
    for fqn, value in found.items():
        assert (value - truth[fqn]).abs().max() <= 1e-10, fqn
    assert measured["optimizer"] == planned


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adafactor_is_that_of_torch_on_whole_parameters(layout: str) -> None:
    check("gpt", LAYOUTS[layout])


@pytest.mark.thorough
@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("name", ["experts", "stacks"])
def test_of_experts_too(name: str, layout: str) -> None:
    check(name, EXPERTS[layout])


def rule_of(engine: Engine) -> FactoredRule:
    flat = engine.optimizer.optimizer
    assert flat is not None
    assert flat.factored is not None
    return flat.factored


# ---- its sums are those of the plan, its bytes too


def reduced(decided: Plan, batch: dict[str, Tensor]) -> list[tuple[int, str]]:
    """Of this rank in its second step: bytes and axis of each all-reduce of the update, in order."""
    seen: list[tuple[int, str]] = []
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.train_step(batch)
        names = {id(engine.groups.over(axis)): axis for axis in ("world", "edp", "etp", "ep", "dp", "tp")}
        real = dist.all_reduce

        def all_reduce(given: Tensor, **options: Any) -> Any:
            seen.append((given.numel() * given.element_size(), names.get(id(options["group"]), "?")))
            return real(given, **options)

        rule = rule_of(engine)
        update = rule.step

        def step(*args: Any) -> None:
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(dist, "all_reduce", all_reduce)
                update(*args)

        patch.setattr(rule, "step", step)
        engine.train_step(batch)
    return seen


def rows_and_calls(host: Any, name: str, layout: dict[str, Any]) -> Any:
    entry = build(name)
    decided = plan(entry.model, spec_of(entry, layout, RULE))
    rows = [(row.bytes, row.axis, row.stage) for row in decided.collectives if "squares over" in row.where]
    return rows, host.run_ranks(decided.mesh.world_size, reduced, decided, entry.batch(8, 0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layout"), [("gpt", "tp2·dp2"), ("gpt", "dp2"), ("stacks", "ep2·dp2"), ("stacks", "ep2·dp2·tp2, etp 1")]
)
def test_the_sums_of_an_update_are_rows_of_the_plan(name: str, layout: str) -> None:
    rows, ranks = session_lab().call(rows_and_calls, name, (LAYOUTS | EXPERTS)[layout])
    assert rows
    alike = {"edp": "dp", "etp": "tp"} if "ep" not in layout else {}  # one group of ranks under two names
    for seen in ranks:
        assert [size for size, _ in seen] == [size for size, *_ in rows]
        named = [alike.get(axis, axis) for _, axis in seen]
        assert "ep" in layout or named == [axis for _, axis, _ in rows]


@pytest.mark.check
def test_a_matrix_keeps_a_value_for_each_row_and_column() -> None:
    entry = families.build("gpt")
    made = plan(entry.model, spec_of(entry, {"mesh": {}, "optimizer": {"alignment": "none"}}, RULE))
    shapes = {row.name: row.shape for row in made.parameters}
    wanted = sum(sum(shape) if len(shape) == 2 else prod(shape) for shape in shapes.values())
    assert made.memory[0].optimizer == 8 * wanted
    assert {(buffer.rule, len(buffer.buckets)) for buffer in made.optimizer.buffers} == {("adafactor", 1)}
    assert len(made.optimizer.buffers) == 2  # vectors, and all else


# ---- saves


def steps_from(
    decided: Plan, batches: list[dict[str, Tensor]], save: Path, start: Path | None
) -> tuple[dict[str, Tensor], dict[str, list[tuple[str, Tensor]]]]:
    """The parameters afterwards, and the means as they were loaded, with the boxes that they are of."""
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        if start is not None:
            engine.load(start)
        rule = rule_of(engine)
        loaded: dict[str, list[tuple[str, Tensor]]] = {}
        for p in rule.parameters:
            for (kind, values), box in zip(p.state.items(), p.factored.boxes, strict=False):
                loaded.setdefault(f"{p.factored.local.fqn}.{kind}", []).append((str(box), values.clone()))
        for batch in batches:
            engine.train_step(batch)
        engine.save(save)
        return engine.gather_parameters(), loaded


def resumed(host: Any, name: str, layout: dict[str, Any], folder: Path) -> Any:
    entry = build(name)
    batches = [entry.batch(8, step) for step in range(4)]
    one, other = (plan(build(name).model, spec_of(entry, given, RULE)) for given in ({"mesh": {}}, layout))
    size = other.mesh.world_size
    whole, _ = host.run_ranks(1, steps_from, one, batches, folder / "whole", None)[0]
    host.run_ranks(size, steps_from, other, batches[:2], folder / "half", None)
    found, there = host.run_ranks(1, steps_from, one, batches[2:], folder / "rest", folder / "half")[0]
    back = host.run_ranks(size, steps_from, other, [], folder / "back", folder / "half")
    host.run_ranks(1, steps_from, one, [], folder / "again", folder / "back")
    return whole, found, there, [loaded for _, loaded in back]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layout"), [("gpt", "tp2·dp2"), ("gpt", "pp2·dp2"), ("stacks", "ep2·dp2"), ("experts", "ep2·dp2")]
)
def test_a_run_goes_on_in_another_layout(name: str, layout: str, tmp_path: Path) -> None:
    call = (resumed, name, (LAYOUTS | EXPERTS)[layout], tmp_path)
    whole, found, there, back = session_lab().call(*call)
    for fqn, value in whole.items():
        assert (found[fqn] - value).abs().max() <= 1e-12, fqn
    for loaded in back:  # bitwise what one process loads, or its part of it
        for fqn, parts in loaded.items():
            ((_, full),) = there[fqn]
            for box, values in parts:
                assert values.shape == full.shape or name == "stacks", (fqn, box)
                is_same = values.shape == full.shape and torch.equal(values, full)
                assert is_same or any(torch.equal(values, part) for part in full.chunk(2)), (fqn, box)
    manifests = [read_step(resolve(tmp_path / folder))[0] for folder in ("back", "again")]
    kinds = [{n: (e.shape, e.values) for n, e in m.tensors.items() if e.is_statistic} for m in manifests]
    assert kinds[0] == kinds[1] != {}


@pytest.mark.check
def test_a_save_has_the_means_under_the_names_of_parameters(tmp_path: Path) -> None:
    entry = families.build("gpt")
    spec = spec_of(entry, {"mesh": {}}, RULE)
    with Engine(plan(entry.model, spec)) as engine:
        engine.save(tmp_path / "fresh")
        engine.train_step(entry.batch(8, 0))
        engine.save(tmp_path / "trained")
        engine.load(tmp_path / "fresh")
        rule = rule_of(engine)
        assert not any(mean.any() for p in rule.parameters for mean in p.state.values())
        assert all(int(count) == 0 for count in rule._counts.values())
    manifest, _ = read_step(resolve(tmp_path / "trained"))
    assert manifest.tensors["blocks.0.mlp.up.weight.row_var"].shape == (128, 1)
    assert manifest.tensors["blocks.0.mlp.up.weight.col_var"].shape == (1, 32)
    assert manifest.tensors["blocks.0.mlp.up.bias"].values == {"parameter": "float64", "variance": "float64"}
    groups = {"groups": {"*.up.weight": {"name": "adamw"}}}
    other = spec_of(families.build("gpt"), {"mesh": {}, "optimizer": groups}, RULE)
    with Engine(plan(families.build("gpt").model, other)) as engine, pytest.raises(PlanError, match=r"up\.weight"):
        engine.load(tmp_path / "trained")
