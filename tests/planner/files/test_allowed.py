"""The names that a plan on disk may hold are those that are written, and no others."""

import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from passes.moe import exchange
from passes.program.ops.sequence import CALLS
from passes.program.program import META
from passes.rules.notation import parse
from passes.rules.own import OWN, OwnRule
from planner.decisions import Decisions
from planner.files import allowed
from planner.frozen_plan import Plan
from planner.saved_plan.plan_file import DECIDED, FORM, PARTS, unseal
from planner.sharding.shards import Shards
from planner.spec.spec import Spec
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

aten: Any = torch.ops.aten


def classes_in(kind: Any, found: dict[type, None]) -> None:
    """Dataclasses and enums that a value of this type may hold."""
    for part in get_args(kind):
        classes_in(part, found)
    if not isinstance(kind, type) or kind in found or not (dataclasses.is_dataclass(kind) or issubclass(kind, Enum)):
        return
    found[kind] = None
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                classes_in(hints[field.name], found)


def test_the_table_has_the_classes_of_the_written_fields_and_no_others() -> None:
    decided, shards = get_type_hints(Decisions), get_type_hints(Shards)
    found: dict[type, None] = {}
    for kind in (*(decided[name] for name in DECIDED), *shards.values(), *PARTS.values(), *allowed.MARKS.values()):
        classes_in(kind, found)
    enums = {(kind.__module__, kind.__name__) for kind in found if issubclass(kind, Enum)}
    assert names_in(allowed.RECORDS) == {(kind.__module__, kind.__name__) for kind in found} - enums
    assert names_in(allowed.ENUMS) == enums


def names_in(table: dict[str, str]) -> set[tuple[str, str]]:
    return {(module, name) for module, names in table.items() for name in names.split()}


def test_the_marks_are_those_of_captured_graphs_and_of_lowering() -> None:
    only_while_captured = {"constant", "asked", "custom", "state"}
    assert allowed.MARKS.keys() == META.keys() - only_while_captured | {"placement"}


class Solved(nn.Module):
    """Calls an op that has no rule: trials show one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        lower = self.up(x).tril() + torch.eye(4)
        return torch.linalg.solve_triangular(lower, x, upper=False).sum(-1).mean()


def test_a_rule_that_trials_showed_is_written_and_read(tmp_path: Path) -> None:
    given = {"mesh": {}, "batch": {"global": 2, "micro": 1}, "inputs": {"x": {"shape": [4, 4], "dtype": "float32"}}}
    decided = plan_again(Solved(), Spec.load(given))
    decided.save(tmp_path / "plan.pt")
    graphs = [p.decisions.program.graph.graph for p in (decided, Plan.load(tmp_path / "plan.pt")) if p.decisions]
    marks = [{node.name: node.meta["inferred"] for node in g.nodes if "inferred" in node.meta} for g in graphs]
    assert marks[0] == marks[1]
    assert "b^ c^ d^, e^ f^ a -> g^ h^ a" in [str(mark) for mark in marks[0].values()]


def test_the_functions_are_those_that_a_captured_graph_may_call() -> None:
    own = {(f.__module__, n) for n, f in vars(exchange).items() if callable(f) and f.__module__ == exchange.__name__}
    of_sequence = {(call.__module__, call.__name__) for call in CALLS}
    assert names_in(allowed.FUNCTIONS) == own | of_sequence | {("passes.program.ops.sequence", "over_data")}


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "inner 33": [{"mesh": {"tp": 2, "pp": 2}, "recompute": "selective", "compile": True}, {"mesh": {"cp": 2}}],
    "llama": [{"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}, "cuda_graphs": {"impl": "emulate"}}],
    "balance": [{"mesh": {"cp": 2}}],
    "no rule": [{"mesh": {"tp": 2}, "recompute": "full"}],
    "mixtral": [{"mesh": {"ep": 2, "dp": 2}}],
    "loop of experts": [{"mesh": {"ep": 2, "dp": 2}}],
    "slots of experts": [{"mesh": {"ep": 2, "dp": 2}}],
}


def written(value: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(kind, name) of each class, function and op in the JSON of a plan."""
    if isinstance(value, list):
        if (
            len(value) == 3
            and isinstance(value[2], list)
            and isinstance(value[0], str)
            and value[0].startswith(("passes.", "planner."))
        ):
            yield "object", tuple(value[:2])
        for part in value:
            yield from written(part)
    elif isinstance(value, dict):
        for kind, content in value.items():
            if kind == "enum":
                yield "enum", tuple(content[:2])
            if kind == "graph":
                yield from (("call", tuple(row[2])) for row in content if row[0] == "call_function")
                yield from (("mark", (key,)) for row in content for key, _ in row[5])
            yield from written(content)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["inner 33", "loop of experts", *(pytest.param(n, marks=pytest.mark.thorough) for n in LAYOUTS)]
)
def test_all_that_a_plan_writes_is_in_the_tables(name: str, tmp_path: Path) -> None:
    for layout in LAYOUTS[name]:
        plan_again(build(name), spec_of(name, **layout)).save(tmp_path / "plan.pt")
        content, _ = unseal(FORM, (tmp_path / "plan.pt").read_bytes())
        found = dict.fromkeys(written([content["objects"], content["model"], content["lengths"]]))
        assert {name for kind, name in found if kind == "object"} <= names_in(allowed.RECORDS)
        assert {name for kind, name in found if kind == "enum"} <= names_in(allowed.ENUMS)
        assert {name for kind, (name,) in ((k, n) for k, n in found if k == "mark")} <= allowed.MARKS.keys()
        calls = {name for kind, name in found if kind == "call"}
        assert calls
        for module, of_module in calls:
            if module == "op":
                allowed.op(of_module)
            elif module != "getitem":
                assert (module, of_module) in names_in(allowed.FUNCTIONS)


def overloads() -> Iterator[Any]:
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


TEXTS = (  # "any index slice split": of lists of texts
    "conv1d conv2d conv3d div einsum fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_irfft "
    "fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn gelu gelu_backward linalg_eigh linalg_eigvalsh linalg_lstsq "
    "linalg_matrix_norm linalg_norm linalg_qr linalg_svd meshgrid pad quantile nanquantile scatter scatter_reduce "
    "searchsorted stft bucketize any index slice split"
)
WITH_TEXT = frozenset(TEXTS.split())


def test_no_allowed_op_writes_or_reads_anything_but_tensors() -> None:
    ops = [op for op in overloads() if allowed.is_allowed(op)]
    assert len(ops) > 500
    for op in ops:
        kinds = " ".join(str(argument.type) for argument in op._schema.arguments)
        assert op._schema.returns
        assert not op._schema.is_mutable, op
        assert "Storage" not in kinds, op
        assert "classes" not in kinds, op
        if "str" in kinds:
            assert op._schema.name.removeprefix("aten::") in WITH_TEXT, op


@pytest.mark.parametrize(
    "name",
    ["aten.from_file.default", "aten.set_.source_Tensor", "aten.resize_.default", "aten.add.out", "aten.save.default",
     "prim.load.default", "debugprims.load_tensor.default", "aten._embedding_bag.default", "aten.item.default",
     "inductor._reinterpret_tensor.default", "aten.__init__.default", "op", "", "aten.add.Tensor.x"],
)  # fmt: skip
def test_ops_that_read_files_or_keep_state_are_not_called(name: str) -> None:
    with pytest.raises(allowed.NotAllowed):
        allowed.op(name)


@pytest.mark.parametrize("name", ["a b", "lambda", "a.None", "1a", "a..b", "", "a,b", "x\n", "a=1", "a.b", 3, None])
def test_a_name_in_source_is_an_identifier(name: Any) -> None:
    with pytest.raises(allowed.NotAllowed):
        allowed.of_source(name)
    assert allowed.of_source("b_1") == "b_1"


def test_an_op_of_the_user_needs_a_rule_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("stored_plans", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(allowed.NotAllowed):
            allowed.op("stored_plans.twice.default")
        packet = torch.ops.stored_plans.twice
        monkeypatch.setitem(OWN, packet, OwnRule("stored_plans::twice", "... -> ...", parse("... -> ...")))
        assert allowed.op("stored_plans.twice.default") is packet.default
