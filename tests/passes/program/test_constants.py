"""What is made of constants alone, and its value."""

from typing import Any

import pytest
import torch
from torch import fx

from passes.program.known_values import Constants, computed, is_made_of
from passes.program.ops.aten import aten
from passes.program.program import Program


class Written:
    """A graph of calls under way, and its values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.program = Program(fx.GraphModule(torch.nn.Module(), self.graph), {}, {}, {}, {}, {}, {}, "")
        self.program.graph.graph = self.graph

    def holder(self, name: str, value: torch.Tensor, *, known: bool = False) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value.to("meta")
        if known:
            self.program.constants[name] = value
        else:
            self.program.inputs[name] = name
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*given[0], **given[1])
        return node

    def constants(self, **options: Any) -> Constants:
        self.program.graph = fx.GraphModule(torch.nn.Module(), self.graph)
        return Constants(self.program, **options)


@pytest.fixture
def written() -> Written:
    return Written()


def of(constants: Constants, node: fx.Node) -> bool:
    return node.name in {n.name for n in constants.nodes}


def in_program(written: Written, constants: Constants, node: fx.Node) -> fx.Node:
    return constants.program.node(node.name)


def test_the_value_of_what_constants_make(written: Written):
    table = written.holder("table", torch.tensor([1.0, 2.0]), known=True)
    made = written.call(aten.mul.Tensor, table, 3.0)
    constants = written.constants()
    value = constants.value(in_program(written, constants, made))
    assert value is not None
    assert value.tolist() == [3.0, 6.0]


def test_what_a_batch_tensor_or_a_random_number_enters_is_none(written: Written):
    batch = written.holder("ids", torch.ones(2))
    reads = written.call(aten.add.Tensor, batch, 1)
    drawn = written.call(aten.rand.default, [2], device="meta")
    after = written.call(aten.neg.default, drawn)
    constants = written.constants()
    assert [of(constants, n) for n in (batch, reads, drawn, after)] == [False] * 4


def test_of_what_reads_shapes_alone_where_asked_for(written: Written):
    ones = written.call(aten.ones_like.default, written.holder("ids", torch.zeros(2, 3)))
    assert not of(written.constants(), ones)
    constants = written.constants(of_shapes=True)
    value = constants.value(in_program(written, constants, ones))
    assert value is not None
    assert value.tolist() == torch.ones(2, 3).tolist()


def test_what_is_too_large_to_look_at_has_no_value(written: Written):
    large = written.call(aten.arange.default, 8, device="meta")
    constants = written.constants(max_elements=4)
    assert of(constants, large)
    assert constants.value(in_program(written, constants, large)) is None


def test_a_factory_call_of_another_device_is_computed_on_the_cpu(written: Written):
    node = written.call(aten.arange.default, 3, device=torch.device("meta"))
    assert computed(node, {}.__getitem__).tolist() == [0, 1, 2]


def test_made_of_known_values_alone(written: Written):
    a, b = written.holder("a", torch.ones(2)), written.holder("b", torch.ones(2))
    both = written.call(aten.add.Tensor, written.call(aten.neg.default, a), b)
    assert is_made_of(both, {a, b})
    assert not is_made_of(both, {a})
    assert not is_made_of(written.call(aten.rand_like.default, a), {a})


def test_an_empty_tensor_is_no_constant_of_its_shape(written: Written):
    x = written.holder("x", torch.zeros(3))
    zeros, empty = written.call(aten.zeros_like.default, x), written.call(aten.empty_like.default, x)
    constants = written.constants(of_shapes=True)
    assert of(constants, zeros)
    assert not of(constants, empty)
