"""The CTC loss of each sequence, as one op with a result of known shape (Graves et al., 2006).

    meshwright::ctc_losses(log_probs [t, b, c], targets [b, s], input_lengths [b], target_lengths [b]) -> [b]

PyTorch's own op also returns log_alpha [b, t, 2 · longest target + 1], with a size that depends on the data; its
backward reads that. Here the backward recomputes log_alpha. Both lengths are data.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("meshwright::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    losses = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return losses.masked_fill(losses.isinf(), 0.0) if zero_infinity else losses


@torch.library.custom_op("meshwright::ctc_losses_backward", mutates_args=())
def ctc_losses_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    given = log_probs, targets, input_lengths, target_lengths
    losses, log_alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(gradient.contiguous(), *given, losses, log_alpha, blank, zero_infinity)


@ctc_losses.register_fake
def _losses(log_probs: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(targets.shape[0])


@ctc_losses_backward.register_fake
def _gradient(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return ctc_losses_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_keep)
CTC_LOSSES: Any = torch.ops.meshwright.ctc_losses.default
