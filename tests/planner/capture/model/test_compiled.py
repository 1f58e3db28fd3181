"""Models that their user compiled, in full or in part: captured as if nothing were compiled, under their own names."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn import functional as F

from planner import Plan, PlanError, capture, plan
from planner.capture.eager_trials import refuse_another_forward
from planner.capture.model.eager import NOTE, in_eager_mode, plain_name, uncompiled
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.sharding.boxes import Box
from planner.spec.spec import Spec
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.pieces import PieceReader, WrittenPiece
from runtime.checkpoint.pretrained_load import match_names
from runtime.checkpoint.saver import write_save
from runtime.distributed.groups import Groups
from runtime.verify.reference import OneProcess
from tests.tools.limits import HANG_SECONDS
from tests.tools.small_saves import content

SPEC: dict[str, Any] = {
    "mesh": {"tp": 2},
    "batch": {"global": 2, "micro": 1},
    "inputs": {"input_ids": {"shape": [6], "dtype": "int64", "high": 32}, "labels": {"like": "input_ids"}},
}


def act(x: Tensor) -> Tensor:
    return F.gelu(x) * 2


compiled_act = torch.compile(act, fullgraph=True)


class Block(nn.Module):
    act: Callable[[Tensor], Tensor] = staticmethod(act)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class CallsCompiled(Block):
    act = staticmethod(compiled_act)


class Decorated(Block):
    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class OwnForward(Block):
    """With a compiled method, its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.compile(super().forward)


class Steps(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def in_place(kind: type[nn.Module] = Block) -> Model:
    model = Model(kind)
    for block in model.blocks:
        block.compile()
    return model


def wrapped(kind: type[nn.Module] = Block) -> Model:
    model = Model(kind)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)  # pyright: ignore
    return model


def wrapped_and_bound() -> Model:
    """The outer forward is bound to the module that holds the wrappers."""
    model = wrapped()
    model.forward = torch.compile(model.forward)
    return model


COMPILED: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "blocks in place": (Block, in_place),
    "sequential blocks in place": (Steps, lambda: in_place(Steps)),
    "wrapped blocks": (Block, wrapped),
    "wrapped sequential blocks": (Steps, lambda: wrapped(Steps)),
    "wrapped blocks, compiled forward": (Block, wrapped_and_bound),
    "a function": (Block, lambda: Model(CallsCompiled)),
    "a decorated forward": (Block, lambda: Model(Decorated)),
    "a method": (Block, lambda: Model(OwnForward)),
    "the model": (Block, lambda: torch.compile(Model())),
    "the model and its blocks": (Block, lambda: torch.compile(wrapped(), fullgraph=True)),
}


def decisions_of(planned: Plan) -> Decisions:
    assert planned.decisions is not None
    return planned.decisions


def calls(planned: Plan) -> list[str]:
    return [f"{n.name} {n.target} {n.args}" for n in decisions_of(planned).program.graph.graph.nodes]


def notes(planned: Plan) -> list[str]:
    return [f"{row.level}: {row.what}" for row in planned.diagnostics]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_model_is_planned_as_if_it_were_not(case: str) -> None:
    kind, make = COMPILED[case]
    model = make()
    before = [(name, id(module), module._compiled_call_impl) for name, module in model.named_modules()]
    names = list(model.state_dict())
    planned, plain = plan(model, SPEC), plan(Model(kind), SPEC)
    assert calls(planned) == calls(plain)
    assert [row.name for row in planned.parameters] == [row.name for row in plain.parameters]
    assert [note for note in notes(planned) if note not in notes(plain)] == [f"info: {NOTE}"]
    assert planned.hash() == plain.hash()
    after = [(name, id(module), module._compiled_call_impl) for name, module in model.named_modules()]
    assert (before, names) == (after, list(model.state_dict()))


def test_the_models_own_tensors_are_found_by_its_own_names() -> None:
    model = wrapped()
    planned = plan(model, SPEC)
    assert planned.owner is not None
    planned.owner.release()
    held = planned.model
    assert held is not None
    assert dict(held.named_parameters())["blocks.1.up.weight"] is model.blocks[1].up.weight
    model.blocks[0] = torch.compile(Block())  # pyright: ignore
    assert dict(held.named_parameters()).keys() == dict(Model().named_parameters()).keys()


def test_a_module_that_has_two_names_stays_one() -> None:
    model = wrapped()
    model.blocks[1] = model.blocks[0]
    plain = uncompiled(model)
    assert plain.blocks[0] is plain.blocks[1]  # pyright: ignore
    assert isinstance(model.blocks[0], OptimizedModule)
    assert uncompiled(plain) is plain


def test_a_captured_model_with_wrappers_is_unchanged_until_it_changes() -> None:
    model = wrapped()
    captured = capture(model, SPEC)
    plan(captured, SPEC)
    model.scale = 2.0
    with pytest.raises(Exception, match="the model has changed since it was captured: scale is new"):
        plan(captured, SPEC)


def test_one_process_beside_a_plan_compiles_nothing() -> None:
    def refuse(graph: Any, example: Any) -> Any:
        raise AssertionError("compiled")

    model = Model()
    for block in model.blocks:
        block.compile(backend=refuse)
    planned = plan(model, SPEC)
    batch = {name: torch.ones(2, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
    assert OneProcess(model, Spec.load(SPEC)).forward_backward(batch)
    refuse_another_forward(model, batch, decisions_of(planned).program)
    with in_eager_mode() as ran:
        model(**batch)
    assert ran


def test_weights_load_by_the_names_of_wrappers_too() -> None:
    assert (
        plain_name("blocks.0._orig_mod.up.weight") == plain_name("_orig_mod.blocks.0.up.weight") == "blocks.0.up.weight"
    )
    assert plain_name("not_orig_mod.up") == "not_orig_mod.up"
    hub = plan(wrapped(), SPEC).hub
    converted = hub.converted({name: value.shape for name, value in wrapped().state_dict().items()})
    assert set(match_names(converted.made, set(Model().state_dict()))) == set(Model().state_dict())


def test_hooks_of_a_wrapper_are_refused() -> None:
    model = wrapped()
    model.blocks[1].register_forward_hook(lambda module, given, output: output * 2)
    with pytest.raises(PlanError, match="hooks are registered on what"):
        plan(model, SPEC)


def test_a_save_with_the_names_of_wrappers_is_read_by_plain_names(tmp_path: Path) -> None:
    boxed = Box((0, 0), (3, 4))
    made = replace(
        content(1, 2.0),
        pieces=[WrittenPiece("blocks.0._orig_mod.up", "parameter", boxed, torch.full((3, 4), 2.0))],
        names={"blocks.0._orig_mod.up": ("_orig_mod.tied",)},
    )
    write_save(Groups(Mesh(), 0, torch.device("cpu"), timedelta(seconds=HANG_SECONDS)), tmp_path, made)
    manifest, _ = read_manifest(save := next(tmp_path.glob("step-*")))
    assert {name: entry.aliases for name, entry in manifest.tensors.items()} == {"blocks.0.up": ("tied",)}
    target = torch.zeros(3, 4)
    with PieceReader(save, manifest) as reader:
        reader.read_into(target, "blocks.0.up", "parameter", boxed)
    assert (target == 2).all()
