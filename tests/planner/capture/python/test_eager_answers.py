"""A forward that asks whether it is traced is captured as it runs in eager mode, or refused at its line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, _guards, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling as asked_by_name
from torch.fx import _symbolic_trace
from transformers.utils import import_utils

from passes.program.program import Program
from planner import PlanError, meta_parameters
from planner.capture.export import capture
from planner.capture.resized import Earlier


class Model(nn.Module):
    def __init__(self, asks: Callable[[Any, Tensor], bool], doubled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.asks, self.doubled = asks, doubled

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if not self.asks(self, x):
            x = self.doubled(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def captured(model: nn.Module) -> Program:
    ids = torch.empty((2, 5), dtype=torch.int64, device="meta")
    return capture(model, {"ids": ids, "labels": ids})


def doubles(program: Program) -> bool:
    return any("mul" in str(node.target) for node in program.graph.graph.nodes)


QUESTIONS: dict[str, Callable[[Any, Tensor], bool]] = {
    "torch.compiler.is_compiling": lambda m, x: torch.compiler.is_compiling(),
    "by name": lambda m, x: asked_by_name(),
    "is_exporting": lambda m, x: torch.compiler.is_exporting(),
    "torch._dynamo": lambda m, x: torch._dynamo.is_compiling(),
    "transformers": lambda m, x: import_utils.is_tracing(x),
    "transformers, compiling": lambda m, x: import_utils.is_torchdynamo_compiling(),
    "fx": lambda m, x: _symbolic_trace.is_fx_tracing(),
    "FakeTensor": lambda m, x: isinstance(x, FakeTensor),
    "one of several": lambda m, x: isinstance(x, (int, FakeTensor)),
    "is_fake": lambda m, x: fake_tensor.is_fake(x),
    "type": lambda m, x: type(x) is not Tensor,
    "type of a weight": lambda m, x: type(m.head.weight) is not nn.Parameter,
    "a weight": lambda m, x: not isinstance(m.head.weight, nn.Parameter),
    "hooks": lambda m, x: len(m._forward_hooks) + len(m._forward_pre_hooks) > 0,
    "fake mode": lambda m, x: _guards.detect_fake_mode([x]) is not None,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_about_tracing_is_answered_as_in_eager_mode(asks: Callable[[Any, Tensor], bool]) -> None:
    model = Model(asks, lambda x: x * 2)
    assert not asks(model, torch.ones(1))
    assert doubles(captured(model))
    assert not {"type", "isinstance"} & set(globals())


def test_classes_stay_usable_in_a_forward() -> None:
    def asks(m: Any, x: Tensor) -> bool:
        made = type("Made", (list,), {})()
        return not (isinstance(made, list) and isinstance(type(made), type) and issubclass(type(made), list))

    assert doubles(captured(Model(asks, lambda x: x * 2)))


def test_a_class_of_parameter_is_the_users_own() -> None:
    class Own(nn.Parameter):
        pass

    model = Model(lambda m, x: type(m.head.bias) is not Own, lambda x: x * 2)
    model.head.bias = Own(torch.zeros(20))
    assert doubles(captured(model))


def test_where_eager_mode_would_look_at_values_the_line_is_reported() -> None:
    model = Model(lambda m, x: not torch.compiler.is_compiling() and bool((x == 7).all()), lambda x: x * 2)
    program = captured(model)
    assert doubles(program)
    (note,) = program.notes
    assert "captured as traced" in note
    assert "test_eager_answers.py" in note


def test_other_calls_of_a_function_that_was_refused_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exports, original = list[int](), torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        exports.append(1)
        return original(*args, **kwargs)

    def looks(x: Tensor) -> bool:
        return not torch.compiler.is_compiling() and bool((x.detach().numpy() == 7).all())

    def asks(m: Any, x: Tensor) -> bool:
        first = looks(x)
        return looks(x + 1) or first

    monkeypatch.setattr(torch.export, "export", counted)
    earlier, ids = Earlier(), torch.empty((2, 5), dtype=torch.int64, device="meta")
    model = Model(asks, lambda x: x * 2)
    program = capture(model, {"ids": ids, "labels": ids}, earlier=earlier)
    assert doubles(program)
    assert len(exports) == 2
    wide = torch.empty((6, 5), dtype=torch.int64, device="meta")
    again = capture(model, {"ids": wide, "labels": wide}, is_known=True, earlier=earlier)
    assert doubles(again)
    assert len(exports) == 2


class Masked(nn.Module):
    """Without its mask where that is all ones, unless traced: the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids)
        if torch.compiler.is_compiling() or not mask.all():
            x = x * mask[..., None]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_branch_of_eager_mode_that_computes_the_same_is_not_reported() -> None:
    ids = torch.empty((2, 5), dtype=torch.int64, device="meta")
    assert not capture(Masked(), {"ids": ids, "labels": ids, "mask": ids}).notes


class Packed(nn.Module):
    """Attention within documents, or plain where eager mode sees but one, as in transformers."""

    def __init__(self, *, is_same: bool = True) -> None:
        super().__init__()
        self.tokens, self.head, self.is_same = nn.Embedding(20, 8), nn.Linear(8, 20), is_same

    def forward(self, ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        x, mask = self.tokens(ids)[:, None], None
        documents = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        if torch.compiler.is_compiling() or not (documents[:, -1] == 0).all():
            mask = documents[:, None, :, None] == documents[:, None, None, :]
            mask = mask.tril() if self.is_same else mask
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)
        return F.cross_entropy(self.head(x).flatten(0, 2), labels.flatten())


def packed(*, is_same: bool = True, dtype: torch.dtype | None = None) -> Program:
    with meta_parameters():
        model = Packed(is_same=is_same)
    ids = torch.empty((2, 5), dtype=torch.int64, device="meta")
    return capture(model, {"ids": ids, "labels": ids, "position_ids": ids}, dtype=dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_model_without_values_is_tried_with_drawn_ones(dtype: torch.dtype | None) -> None:
    assert not packed(dtype=dtype).notes


def test_a_model_without_values_whose_sides_differ_is_reported() -> None:
    (note,) = packed(is_same=False).notes
    assert "captured as traced" in note


def halves_where_seen(x: Tensor) -> Tensor:
    return x / 2 if not torch.compiler.is_compiling() and bool((x.abs() > 0).any().item()) else x


HIDDEN: dict[str, Callable[[Any, Tensor], bool]] = {
    "values": lambda m, x: halves_where_seen(x) is x,
    "attribute": lambda m, x: hasattr(x, "fake_mode"),
    "name": lambda m, x: "Fake" in x.__class__.__name__,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asks", HIDDEN.values(), ids=HIDDEN)
def test_another_loss_than_that_of_one_run_is_refused(asks: Callable[[Any, Tensor], bool]) -> None:
    with pytest.raises(PlanError, match=r"its loss is|data-dependent"):
        captured(Model(asks, lambda x: x * 2))


class Autocast(Model):
    """In bfloat16 but for the weights. Its bias is added in the graph by an op of its own, which rounds once more."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids, labels)


class InParts(Autocast):
    """Eager mode cannot run it in float64: the head is float32 whatever its input was."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = F.linear(self.tokens(ids), self.head.weight[:8], self.head.bias[:8])
        if not self.asks(self, x):
            x = self.doubled(x)
        return F.cross_entropy(F.linear(x.float(), self.head.weight, self.head.bias).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", [Autocast, InParts])
def test_another_rounding_of_a_graph_in_half_precision_is_not_refused(kind: type[Model]) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        captured(kind(lambda m, x: True, lambda x: x))


@pytest.mark.parametrize("kind", [Autocast, InParts])
def test_another_loss_in_half_precision_is_refused(kind: type[Model]) -> None:
    with pytest.raises(PlanError, match="its loss is"):
        captured(kind(HIDDEN["attribute"], lambda x: x * 2))
