"""Rules by trial: what they claim of the ops that have rules is in these; ops of users' own; what cannot be tried."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.program.ops.aten import draws, packet_of
from passes.rules.flops import node_flops
from passes.rules.own import OWN
from passes.rules.rule import Factor, OpRule, Role, call_of, operands_of
from passes.rules.table import rule_of
from passes.rules.trials import called
from planner import Plan, plan
from planner.capture.inferred_rules import infer_rules, inferred
from tests.passes.rules.test_table import EXAMPLES
from tests.tools import own_ops
from tests.tools.captures import program_again


def own_op(function: Callable[..., Tensor]) -> Any:
    """Registered as meshwright_trials::NAME, with its own derivative as the backward."""
    names = list(inspect.signature(function).parameters)
    operands, gradients = ", ".join(f"Tensor {n}" for n in names), ", ".join(["Tensor"] * len(names))
    register = partial(torch.library.custom_op, mutates_args=())
    name = f"meshwright_trials::{function.__name__}"
    op = register(name, function, schema=f"({operands}) -> Tensor")
    backward = register(
        f"{name}_backward",
        lambda g, *given: alone(torch.func.vjp(function, *given)[1](g)),
        schema=f"(Tensor g, {operands}) -> ({gradients})",
    )
    op.register_fake(lambda first, *_: torch.empty_like(first))
    backward.register_fake(lambda g, *given: alone(tuple(map(torch.empty_like, given))))
    op.register_autograd(
        lambda ctx, g: backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


def alone(tensors: tuple[Tensor, ...]) -> Any:
    """As an op returns them."""
    return tensors if len(tensors) > 1 else tensors[0]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def over_largest(x: Tensor) -> Tensor:
    return x / (x.abs().max() + 1)


def sine_of_small(x: Tensor) -> Tensor:
    """By elements while all values are small."""
    return x.sin() if x.abs().max() < 50 else x - x.sum()


def in_float32(x: Tensor) -> Tensor:
    return x.float().cumsum(1).to(x.dtype)


def wkv(k: Tensor, v: Tensor, decay: Tensor, first: Tensor) -> Tensor:
    """RWKV's weighted mean of the past, a step at a time (arxiv.org/abs/2305.13048)."""
    top, bottom, rows = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
        now = torch.exp(first + key)
        rows.append((top + now * value) / (bottom + now))
        top, bottom = decay * top + torch.exp(key) * value, decay * bottom + torch.exp(key)
    return torch.stack(rows, 1)


def never(x: Tensor) -> Tensor:
    raise RuntimeError("no CPU kernel")


OPS = {f.__name__: own_op(f) for f in (centred, over_largest, sine_of_small, in_float32, wkv, never)}


@pytest.fixture(autouse=True)
def _no_op_has_a_rule_of_its_own() -> Iterator[None]:
    before = dict(OWN)
    OWN.clear()
    yield
    OWN.update(before)


# ---- beside the table


def plain_calls() -> list[Any]:
    """One result, random numbers in none, each tensor once."""
    found = []
    for target, examples in EXAMPLES.items():
        for number, given in enumerate(examples):
            if isinstance(target, torch._ops.OpOverload) and not draws(target) and "empty" not in str(target):
                found.append(pytest.param(target, given, id=f"{packet_of(target).__name__}-{number}"))
    return found


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("target", "given"), plain_calls())
def test_a_trial_claims_nothing_that_the_table_denies(target: Any, given: tuple[Any, ...]) -> None:
    words = given[-1] if isinstance(given[-1], dict) else {}
    node, _ = called(target, *(g for g in given if g is not words), **words)
    rule, call = rule_of(node), call_of(node)
    assert rule is not None
    assert call is not None
    pattern = inferred(node)
    found = pattern.rule(call) if pattern is not None else None
    denied = [f for f in (found.factors if found else ()) if f.role is not Role.MIX and not _follows(f, rule)]
    assert denied == []


def _follows(claimed: Factor, rule: OpRule) -> bool:
    """Whether the outermost factors of its dims in the table are one, or an operand is not read there."""
    read = [p for p in claimed.places if p.operand not in rule.unread]
    outer = {factors[-1] if (factors := rule.along(p.operand, p.dim)) else None for p in read}
    return not read or (len(outer) == 1 and all(f is not None and f.role is claimed.role for f in outer))


# ---- ops of users' own


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("centred", "c^ a b -> d^ a b"),
        ("over_largest", "None"),
        ("sine_of_small", "None"),
        ("in_float32", "a b^ -> a c^"),
        ("never", "None"),
    ],
)
def test_the_pattern_of_an_own_op(name: str, pattern: str) -> None:
    shape = (4, 6, 2) if name == "centred" else (4, 6)
    node, _ = called(torch.ops.aten.clone.default, torch.randn(shape, dtype=torch.float64))
    node.target = getattr(torch.ops.meshwright_trials, name).default
    assert str(inferred(node)) == pattern


def test_the_scan_of_rwkv_is_by_itself_for_each_sequence_and_channel() -> None:
    graph, shapes = torch.fx.Graph(), {"k": (4, 6, 2), "v": (4, 6, 2), "decay": (2,), "first": (2,)}
    operands = [graph.placeholder(name) for name in shapes]
    for node, shape in zip(operands, shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=torch.float64, device="meta")
    node = graph.call_function(torch.ops.meshwright_trials.wkv.default, tuple(operands))
    node.meta["val"] = operands[0].meta["val"]
    assert str(inferred(node)) == "a c^ b, a d^ b, b, b -> a e^ b"


def test_large_calls_are_tried_small() -> None:
    node, _ = called(torch.ops.aten.clone.default, torch.randn(300, 200, 8))
    node.target = torch.ops.meshwright_trials.centred.default
    assert str(inferred(node)) == "c^ a b -> d^ a b"


def test_a_captured_program_notes_the_patterns_of_ops_without_rules_and_of_no_other() -> None:
    ids = torch.zeros(2, own_ops.LENGTH, dtype=torch.int64)
    program = program_again(own_ops.build(), {"ids": ids, "labels": ids})
    infer_rules(program)
    found = {str(n.target): str(n.meta["inferred"]) for n in program.graph.graph.nodes if "inferred" in n.meta}
    assert found == {
        "meshwright_tests.gelu_linear.default": "a b d^, c e^, c -> a b c",
        "meshwright_tests.decayed.default": "a c^ b, b -> a d^ b",
        "meshwright_tests.half_linear.default": "a b d+, c d+ -> a b c",
    }
    (call, _) = [n for n in program.graph.graph.nodes if "gelu" in str(n.target)]
    assert [(f.role, f.size) for f in rule_of(call).factors if len(f.places) > 1] == [
        (Role.EACH, 2),
        (Role.EACH, own_ops.LENGTH),
        (Role.EACH, 4 * own_ops.CHANNELS),
    ]
    assert len(operands_of(call)) == 3
    flops = {str(n.target): node_flops(n) for n in program.graph.graph.nodes if "inferred" in n.meta}
    tokens, channels = 2 * own_ops.LENGTH, own_ops.CHANNELS
    assert flops == {  # one sums a dim over two operands: a product
        "meshwright_tests.gelu_linear.default": 0,
        "meshwright_tests.decayed.default": 0,
        "meshwright_tests.half_linear.default": 2 * tokens * channels * 4 * channels,
    }


def test_a_loss_with_a_rule_of_its_own_keeps_that() -> None:
    class Unreduced(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return (F.cross_entropy(super().forward(x), labels, reduction="none") * labels).sum()

    shapes = {"x": torch.zeros(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}
    program = program_again(Unreduced(6, 6), shapes)
    infer_rules(program)
    (loss,) = [n for n in program.graph.graph.nodes if "cross_entropy" in str(n.target)]
    assert "inferred" not in loss.meta
    assert inferred(loss) is not None  # a trial alone would find that each row is by itself


# ---- in a plan


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.embedding, self.up = nn.Embedding(32, 8), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.down(self.op(self.up(self.embedding(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(name: str, **tensor_parallel: Any) -> Plan:
    ids = {"shape": [6], "dtype": "int64", "high": 32}
    spec = {"mesh": {"tp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": {"ids": ids, "labels": ids}}
    return plan(Net(OPS[name]).double(), spec | {"tensor_parallel": tensor_parallel})


def rows_of(made: Plan, name: str) -> list[tuple[str, str]]:
    return [(row.level, row.what) for row in made.diagnostics if f"meshwright_trials.{name}.default" in row.what]


def test_the_plan_says_which_rule_trials_have_shown_and_that_the_op_mixes_sequences() -> None:
    made = planned("centred")
    assert rows_of(made, "centred") == [
        (
            "warning",
            "meshwright_trials.centred.default mixes the sequences of a batch: each microbatch sees only its own",
        ),
        ("info", 'meshwright_trials.centred.default has no rule; by trials on random values it has "c^ a b -> d^ a b"'),
    ]
    assert {row.name: row.style for row in made.parameters if "weight" in row.name}["up.weight"] == "column"


def test_an_op_that_cannot_be_tried_is_replicated_and_said_to_be_unknown() -> None:
    made = planned("never")
    assert rows_of(made, "never") == [
        (
            "warning",
            "meshwright_trials.never.default has no rule: if it mixes the sequences of a batch, each microbatch sees "
            "only its own",
        ),
        (
            "warning",
            "meshwright_trials.never.default has no rule and is replicated on every rank, 13.6% of the estimated work",
        ),
    ]
    fixes = {row.fix for row in made.diagnostics if "has no rule" in row.what}
    assert fixes == {
        'if it is an op of your own, give it a rule: meshwright.rule("meshwright_trials::never", "… -> …")',
    }


def test_without_trials_the_op_is_replicated() -> None:
    made = planned("centred", infer_rules=False)
    assert [what.split(":")[0].split(" and is")[0] for _, what in rows_of(made, "centred")] == [
        "meshwright_trials.centred.default has no rule"
    ] * 2
    assert {row.name: row.style for row in made.parameters}["up.weight"] == "row"
