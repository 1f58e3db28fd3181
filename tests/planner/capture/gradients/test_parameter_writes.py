"""A forward that writes into a parameter is refused; embeddings whose gradient is another one too."""

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import VOCABULARY, WIDTH, Body, OneBody, assert_capture_equals, batch


def with_embedding(**options: object) -> OneBody:
    model = OneBody(lambda model, x: model.up(x))
    model.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64, **options)  # pyright: ignore[reportArgumentType]
    return model


def scaled(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.up.weight.mul_(0.99)
    return model.up(x)


def scaled_by_data(model: OneBody, x: Tensor) -> Tensor:
    model.up.weight.data.mul_(0.99)
    return model.up(x)


def row_of_a_view(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.up.weight.view(-1)[:WIDTH].zero_()
    return model.up(x)


def copied(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.up.weight.copy_(model.up.weight / model.up.weight.norm())
    return model.up(x)


def half(model: OneBody, x: Tensor) -> Tensor:
    """The value after it is the same at each step, so that no comparison with eager mode shows it."""
    with torch.no_grad():
        model.up.weight.split(WIDTH // 2)[0].zero_()
    return x + model.up(x)


def of_a_list(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_zero_([model.up.weight, model.up.bias])
    return x + model.up(x)


WRITES = [scaled, scaled_by_data, row_of_a_view, copied, half, of_a_list]


@pytest.mark.thorough
@pytest.mark.parametrize("body", WRITES, ids=lambda body: body.__name__)
def test_a_write_into_a_parameter_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match=r"the forward writes into parameter up\.weight: the update") as caught:
        capture(OneBody(body), batch())
    assert caught.value.where.line
    assert "new value" in caught.value.fix


def test_an_embedding_with_max_norm_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError, match=r"parameter embed\.weight \(max_norm rescales its rows\)") as caught:
        capture(with_embedding(max_norm=1.0), batch())
    assert caught.value.where.module == "embed"
    assert "self.embed(ids)" in caught.value.where.code
    assert "max_norm" in caught.value.fix


def test_an_embedding_scaled_by_frequency_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError, match="scale_grad_by_freq") as caught:
        capture(with_embedding(scale_grad_by_freq=True), batch())
    assert caught.value.where.module == "embed"
    assert "self.embed(ids)" in caught.value.where.code


def test_an_embedding_with_sparse_gradients_has_the_same_ones_dense() -> None:
    assert_capture_equals(with_embedding(sparse=True))
    assert_capture_equals(with_embedding(sparse=True, padding_idx=3))


@pytest.mark.thorough
def test_a_write_into_a_copy_or_a_buffer_is_no_write_into_a_parameter() -> None:
    def body(model: OneBody, x: Tensor) -> Tensor:
        model.seen.add_(1)  # pyright: ignore[reportCallIssue]
        weight = model.up.weight.clone()
        weight[0] = 0.0
        return x @ weight

    model = OneBody(body)
    model.register_buffer("seen", torch.zeros(()))
    assert capture(model, batch()).notes == ["the forward updates buffer seen: the plan drops this update"]
    assert_capture_equals(model)


def cached_rotations(model: OneBody, x: Tensor) -> Tensor:
    """Two layers that share a module: the second reads of the cache what the first has written into it."""
    for _ in range(2):
        x = x * (model.kept[: x.shape[1]] if model.num_kept >= x.shape[1] else fill(model, x.shape[1]))
    return model.up(x)


def fill(model: OneBody, length: int) -> Tensor:
    rotations = torch.outer(torch.arange(length, dtype=torch.float64), model.kept.new_ones(WIDTH) / 7).cos()
    model.kept[:length] = rotations
    model.num_kept = length
    return rotations


def counted(model: OneBody, x: Tensor) -> Tensor:
    model.kept.add_(1.0)
    return model.up(x) * model.kept[0]


def warmed_up(model: OneBody, x: Tensor) -> Tensor:
    """The first calls are alike, a later one is not."""
    model.kept.add_(1.0)
    return model.up(x) * (model.kept[0] / 10).floor()


def averaged(model: OneBody, x: Tensor) -> Tensor:
    model.kept[0] = 0.9 * model.kept[0] + 0.1 * x.detach().mean((0, 1))
    return model.up(x) + model.kept[0]


def changed_by_the_next(model: OneBody, x: Tensor) -> Tensor:
    """The second call computes the same, and writes what the third one reads."""
    scale = model.kept[0].clone()
    if model.num_kept:
        model.kept.add_(1.0)
    model.num_kept = 1
    return model.up(x) * scale


def with_cache(body: Body) -> OneBody:
    model = OneBody(body)
    model.num_kept = 0
    model.register_buffer("kept", torch.zeros(32, WIDTH, dtype=torch.float64), persistent=False)
    return model


def test_a_buffer_that_keeps_what_each_call_would_compute_is_a_cache() -> None:
    assert capture(with_cache(cached_rotations), batch()).notes == []
    assert_capture_equals(with_cache(cached_rotations))


@pytest.mark.parametrize("body", [counted, warmed_up, averaged], ids=lambda body: body.__name__)
def test_a_buffer_that_the_next_call_finds_changed_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match="the forward updates kept and computes with it") as caught:
        capture(with_cache(body), batch())
    assert caught.value.where.line


def test_a_buffer_that_the_second_call_changes_for_the_third_is_refused() -> None:
    with pytest.raises(PlanError, match="the forward depends on Python state of earlier calls"):
        capture(with_cache(changed_by_the_next), batch())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def parametrized(model: OneBody, x: Tensor) -> Tensor:
    nn.utils.parametrize.register_parametrization(model.up, "weight", Doubled())
    try:
        return model.up(x)
    finally:
        nn.utils.parametrize.remove_parametrizations(model.up, "weight", leave_parametrized=False)


def set_to_itself(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = model.up.weight.set_(model.up.weight)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return x.clone().add_(0.5) @ weight  # a write, so that the graph is made functional


@pytest.mark.thorough
@pytest.mark.parametrize("body", [parametrized, set_to_itself], ids=lambda body: body.__name__)
def test_a_parameter_set_to_itself_is_not_written(body: Body) -> None:
    """PyTorch registers a parametrization so, and peft one for the forward of adapted experts; it has its gradient."""
    assert_capture_equals(OneBody(body))


def set_to_another(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.up.weight.set_(model.up.weight * 0.5)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return model.up(x)


def test_a_parameter_set_to_another_tensor_is_refused() -> None:
    with pytest.raises(PlanError, match="set_ changes the memory of a tensor that is read later"):
        capture(OneBody(set_to_another), batch())


def cast_to_what_it_is(model: OneBody, x: Tensor) -> Tensor:
    model.up = model.up.to(torch.float64)
    return model.up(x)


def test_a_cast_of_a_module_to_the_dtype_that_it_has_changes_nothing() -> None:
    assert_capture_equals(OneBody(cast_to_what_it_is))


def cast_for_good(model: OneBody, x: Tensor) -> Tensor:
    model.up = model.up.to(torch.float32)
    return model.up(x.float()).double()


def test_a_cast_of_the_models_own_weights_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError, match=r"moves its own up\.weight: from torch\.float64 to torch\.float32") as caught:
        capture(OneBody(cast_for_good), batch())
    assert "model.up.to(torch.float32)" in caught.value.where.code
    assert "before planning" in caught.value.fix


def test_a_module_made_in_the_forward_may_be_cast() -> None:
    def body(model: OneBody, x: Tensor) -> Tensor:
        return nn.LayerNorm(x.shape[-1], elementwise_affine=False).to(torch.float64)(model.up(x))

    assert_capture_equals(OneBody(body))
