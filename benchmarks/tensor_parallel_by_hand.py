"""Tensor parallelism as an expert writes it by hand with torch alone, for benchmarks/model.py: the target to reach.

Two all-reduces a layer forward and two backward, a vocabulary-parallel embedding, and a vocabulary-parallel
cross-entropy that exchanges three scalars a token.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model import VOCABULARY, Layer, Model


class Enter(torch.autograd.Function):
    """Identity forward, all-reduce backward: in front of column-parallel linears."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """All-reduce forward, identity backward: behind a row-parallel linear, before its bias."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class RowLinear(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, size: int) -> None:
        super().__init__()
        self.weight = shard(whole.weight, 1, rank, size)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(x, self.weight)) + self.bias


class EnterAfter(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return Enter.apply(self.norm(x))


class ShardedEmbedding(nn.Module):
    def __init__(self, whole: nn.Embedding, rank: int, size: int) -> None:
        super().__init__()
        self.weight = shard(whole.weight, 0, rank, size)
        self.first = rank * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        inside, local = locate(tokens, self.first, self.weight.shape[0])
        return Leave.apply(F.embedding(local, self.weight) * inside.unsqueeze(-1))


class ShardedCrossEntropy(torch.autograd.Function):
    """Mean over tokens of log(sum of exponentials) - logit of the target; logits are this rank's columns."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int) -> Tensor:
        shape, logits, targets = logits.shape, logits.flatten(0, 1), targets.flatten()
        top = logits.amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(1)
        inside, local = locate(targets, first, logits.shape[1])
        hit = shifted.gather(1, local.unsqueeze(1)).squeeze(1) * inside
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(1), hit])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(1)), inside, local)
        ctx.shape = shape
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, grad: Tensor):
        probabilities, inside, local = ctx.saved_tensors
        probabilities[torch.arange(len(local)), local] -= inside.to(probabilities.dtype)
        return probabilities.mul_(grad / len(local)).view(ctx.shape), None, None


def shard(parameter: Tensor, dim: int, rank: int, size: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(size, dim)[rank].clone())


def locate(tokens: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Which tokens lie in [first, first + size), and their places there (0 for the others)."""
    inside = (tokens >= first) & (tokens < first + size)
    return inside, (tokens - first) * inside


def parallelize(model: Model, rank: int, size: int) -> Model:
    """Cut ``model`` in place to the shard of ``rank``."""
    model.embedding.token = ShardedEmbedding(model.embedding.token, rank, size)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attention = layer.attention
        for linear in (attention.query, attention.key, attention.value, layer.up):
            linear.weight, linear.bias = shard(linear.weight, 0, rank, size), shard(linear.bias, 0, rank, size)
        attention.out, layer.down = RowLinear(attention.out, rank, size), RowLinear(layer.down, rank, size)
        layer.norm_attention, layer.norm_mlp = EnterAfter(layer.norm_attention), EnterAfter(layer.norm_mlp)
    model.head.norm = EnterAfter(model.head.norm)
    model.head.linear.weight = shard(model.head.linear.weight, 0, rank, size)
    return model


def loss(model: Model, tokens: Tensor, targets: Tensor, rank: int, size: int) -> Tensor:
    return ShardedCrossEntropy.apply(model(tokens), targets, rank * (VOCABULARY // size))
