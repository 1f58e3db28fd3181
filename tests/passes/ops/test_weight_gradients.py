"""The handle of weight gradients: what is put aside runs once, in its order, under its key."""

import pytest
import torch

from passes.ops.weight_gradients import WeightGradients


def noting(done: list[str], name: str, begins: bool = False):
    """(work, begin) that note what they do."""

    def begin():
        done.append(f"begin {name}")
        return lambda: name

    def work(given):
        assert given == (name if begins else None)
        assert not torch.is_grad_enabled()
        done.append(name)

    return work, begin if begins else None


def test_work_runs_under_its_key_in_the_order_in_which_it_came():
    handle, done = WeightGradients(), []
    for microbatch in (0, 1):
        with handle.put_aside((0, microbatch)):
            assert handle.waits
            for name in "ab":
                handle.keep(*noting(done, f"{name}{microbatch}"))
    assert not handle.waits
    assert handle.num_waiting == 2
    handle.run((0, 1))
    assert done == ["a1", "b1"]
    handle.run((0, 0))
    assert done == ["a1", "b1", "a0", "b0"]
    assert handle.num_waiting == 0


def test_an_exchange_begins_while_the_work_before_it_is_done():
    handle, done = WeightGradients(), []
    with handle.put_aside((0, 0)):
        handle.keep(*noting(done, "a", begins=True))
        handle.keep(*noting(done, "b"))
        handle.keep(*noting(done, "c", begins=True))
        handle.keep(*noting(done, "d", begins=True))
    handle.run((0, 0))
    assert done == ["begin a", "a", "begin c", "b", "begin d", "c", "d"]


def test_a_stage_without_weights_has_nothing_to_do():
    handle = WeightGradients()
    with handle.put_aside((1, 3)):
        pass
    handle.run((1, 3))
    assert handle.num_waiting == 0


def test_work_that_ran_or_was_never_put_aside_does_not_run():
    handle = WeightGradients()
    with handle.put_aside((0, 0)):
        pass
    handle.run((0, 0))
    for key in ((0, 0), (0, 1)):
        with pytest.raises(AssertionError, match="no backward has deferred work"):
            handle.run(key)


def test_work_is_not_put_aside_twice():
    handle = WeightGradients()
    with handle.put_aside((0, 0)):
        pass
    with pytest.raises(AssertionError, match="has not run"), handle.put_aside((0, 0)):
        pass
    handle.forget()
    assert handle.num_waiting == 0
    with handle.put_aside((0, 0)):
        pass


def test_outside_of_a_backward_that_waits_nothing_is_put_aside():
    handle = WeightGradients()
    with handle.put_aside(None):
        assert not handle.waits
    assert handle.num_waiting == 0
    with pytest.raises(AssertionError, match="no work is being deferred"):
        handle.keep(lambda given: None)


def test_unbound_or_looked_at_weights_are_autograds():
    handle, weight = WeightGradients(), torch.ones(2)
    assert handle.place_of(weight) is None

    class Places:
        def place_of(self, parameter):
            return "place" if parameter is weight else None

    handle.bind(Places())  # pyright: ignore
    assert handle.place_of(weight) == "place"
    assert handle.place_of(torch.ones(2)) is None
    with handle.by_autograd():
        assert handle.place_of(weight) is None
    assert handle.place_of(weight) == "place"
