"""Measure one device, and the links between ranks.

product      y[m, n] = x[m, k] @ W[n, k].T, and both gradients    2·m·k·n operations each
attention    causal, forward and backward                         3 · 4·b·h·s·s·d operations, all of it counted
moving       copy, and the ops between products, both ways        bytes that are read and written
small        a chain of ops on few elements, forward and backward
exchanges    the collectives of a training step, over all ranks and over pairs, at a few sizes
slack        bytes that PyTorch's allocator reserves beyond tensors while a few layers train, on a GPU; at least the
             default of ``device.slack``, because a real model has tensors of more sizes

Each call has other operands than the one before, as the layers of a model do, so that no cache holds all of them.
Values are random: a GPU that multiplies equal numbers draws less power, and its clock stays higher than in a step.

``work`` of an exchange is the bytes of the full tensor: of an all-reduce, the tensor of a rank; of an all-gather, its
result; of a reduce-scatter, its input; of p2p, the message that each rank sends while it receives another. A product
runs before each exchange, as in a step: ranks that share cores arrive at different times and wait. The product is timed
alone too, to be subtracted.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from passes.ops.axis import all_gather_single, reduce_scatter_single
from planner.cluster.cluster import GPU_SLACK
from planner.mesh import Mesh
from runtime.calibrate.measurements import Clock, Timed
from runtime.distributed.groups import Groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ON_CPU = ((32, 256, 256), (128, 64, 256), (128, 256, 256), (256, 512, 512), (512, 512, 2048))
_ON_CUDA = ((256, 2048, 2048), (2048, 256, 2048), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
_NO_CACHE = {"cpu": 1 << 26, "cuda": 1 << 29}  # bytes
_MOST_SETS = 64
_CHAIN = 100
_MOST_SECONDS = 3.0  # maximum duration of one call; slower ones are skipped
LAYERS, SEQUENCES, LENGTH, WIDTH, VOCABULARY, STEPS = 4, 4, 2048, 2048, 32000, 2
OPTIMIZER_BYTES = 16
_BYTES_ON_CPU = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_BYTES_ON_CUDA = (1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28)
_LEAST_WITH_PAIRS = 4  # minimum number of ranks to measure pairs separately
_Call = tuple[str, Callable[[], object]]


def products(clock: Clock, skipped: list[str]) -> Iterator[Timed]:
    """Time products of each dtype, from small to large, until a call would take too long."""
    sizes = _ON_CUDA if clock.device.type == "cuda" else _ON_CPU
    for dtype in DTYPES:
        name, rate = str(dtype).removeprefix("torch."), 0.0
        for m, k, n in sizes:
            work = 2.0 * m * k * n
            if rate and work / rate > _MOST_SECONDS:
                skipped.append(f"a product of {name} [{m}, {k}] · [{k}, {n}]: it would take {work / rate:.0f} s")
                break
            operands = _in_turn(clock, ((m, k), (n, k), (m, n)), dtype)
            seconds = clock.seconds(lambda operands=operands: _product_and_gradients(*next(operands)))
            timed = Timed(name, work, seconds / 3, (m, k, n))
            rate = timed.rate
            yield timed


def _product_and_gradients(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.linear(x, weight), y @ weight, y.t() @ x


def attention(clock: Clock) -> Iterator[Timed]:
    """Time attention in the dtype in which models are trained on this device."""
    on_cuda = clock.device.type == "cuda"
    b, h, s, d = (4, 16, 2048, 64) if on_cuda else (1, 4, 256, 64)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    operands = _in_turn(clock, ((b, h, s, d),) * 3, dtype, asks=True)

    def call() -> None:
        q, k, v = next(operands)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    yield Timed(str(dtype).removeprefix("torch."), 3.0 * 4 * b * h * s * s * d, clock.seconds(call))


def moved(clock: Clock) -> Iterator[Timed]:
    """Time copies too large for any cache, then the memory-bound ops between the products of a block."""
    large = 1 << (28 if clock.device.type == "cuda" else 23)  # elements
    first, second, out = (torch.full((large,), 0.5, device=clock.device) for _ in range(3))
    yield Timed("copy", 8.0 * large, clock.seconds(lambda: out.copy_(first)))
    yield Timed("add", 12.0 * large, clock.seconds(lambda: torch.add(first, second, out=out)))
    rows, width = (8192, 4096) if clock.device.type == "cuda" else (512, 512)
    for name, passes, op in _between_products(width):
        operands = _in_turn(clock, ((rows, width),), torch.float32, asks=True)
        seconds = clock.seconds(lambda operands=operands, op=op: _both_ways(op, *next(operands)))
        yield Timed(name, 4.0 * passes * rows * width, seconds)


def _between_products(width: int) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Yield (name, number of tensors of x's size that forward and backward read and write, op)."""
    yield "gelu", 5, lambda x: F.gelu(x, approximate="tanh")
    yield "layer_norm", 5, lambda x: F.layer_norm(x, (width,))
    yield "add of one", 2, lambda x: x + 1.0  # passes its gradient on
    yield "softmax", 5, lambda x: torch.softmax(x, -1)


def _both_ways(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    out = op(x)
    torch.autograd.grad(out, x, out.detach())


def small(clock: Clock) -> Timed:
    """Time one op of a chain of tiny ops, forward or backward: the minimum time of an op on host or device."""
    x = torch.full((16,), 0.5, device=clock.device, requires_grad=True)

    def call() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y * 0.5
        torch.autograd.grad(y, x, y.detach())

    return Timed("small", 1.0, clock.seconds(call) / (2 * _CHAIN))


def _in_turn(
    clock: Clock, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, *, asks: bool = False
) -> Iterator[tuple[Tensor, ...]]:
    """Cycle through operands of these shapes that together exceed any cache. ``asks``: they require gradients."""
    num_bytes = sum(prod(shape) for shape in shapes) * dtype.itemsize
    count = max(2, min(_MOST_SETS, _NO_CACHE[clock.device.type] // num_bytes))
    return cycle(
        [
            tuple(torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=asks) for shape in shapes)
            for _ in range(count)
        ]
    )


class Layer(nn.Module):
    """An MLP with a norm before it, as between the attentions of a Transformer."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)
        self.up = nn.Linear(width, 4 * width, device=device, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * width, width, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def reserved_share(device: torch.device) -> float | None:
    """Return the slack of a GPU's allocator; None if its free memory is too small for these layers."""
    try:
        return round(max(GPU_SLACK, *(_of_steps(device, again=again) for again in (False, True))), 3)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _of_steps(device: torch.device, *, again: bool) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    train(device, again=again)
    lived, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return (reserved - lived) / lived


def train(device: torch.device, *, again: bool, width: int = WIDTH, length: int = LENGTH) -> list[Tensor]:
    """Return the gradients of the last of a few steps without updates. ``again``: recompute each layer."""
    layers = nn.ModuleList([Layer(width, device) for _ in range(LAYERS)])
    head = nn.Linear(width, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    weights = [*layers.parameters(), *head.parameters()]
    stays = [torch.empty(OPTIMIZER_BYTES * w.numel(), device=device, dtype=torch.uint8) for w in weights]
    gradients: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(SEQUENCES, length, width, device=device, dtype=torch.bfloat16)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        logits = head(x).flatten(0, 1).float()
        target = torch.zeros(SEQUENCES * length, device=device, dtype=torch.int64)
        gradients = list(torch.autograd.grad(F.cross_entropy(logits, target), weights))
    del stays
    return gradients


def measured_mesh(size: int) -> tuple[Mesh, tuple[str, ...]]:
    """Return a mesh with a group of all ranks and, with enough ranks, of each pair; and the axes that it combines."""
    with_pairs = size >= _LEAST_WITH_PAIRS and size % 2 == 0
    return (Mesh(tp=2, dp=size // 2), ("tp-dp",)) if with_pairs else (Mesh(dp=size), ())


def _all_ranks(groups: Groups) -> ProcessGroup | None:
    return groups.over("tp-dp") or groups.over("dp")  # the groups of a step, in which ranks of a host may share memory


def product(clock: Clock) -> Callable[[], Tensor]:
    """Return the matrix product that runs before each exchange."""
    m = 4096 if clock.device.type == "cuda" else 384
    x, weight = torch.full((m, m), 0.5, device=clock.device), torch.full((m, m), 0.5, device=clock.device)
    return lambda: F.linear(x, weight)


def exchanges(clock: Clock) -> Iterator[Timed]:
    """Time every kind of exchange at every size, each with a product before it."""
    size, before = clock.groups.mesh.world_size, product(clock)
    for num_bytes in _BYTES_ON_CUDA if clock.device.type == "cuda" else _BYTES_ON_CPU:
        whole = torch.zeros(num_bytes // 4 // size * size, device=clock.device)
        calls = [(size, *call) for call in _collectives(whole, _all_ranks(clock.groups), size)]
        if (pair := clock.groups.over("tp")) is not None:
            calls += [(2, *call) for call in _collectives(whole, pair, 2)]
        for ranks, kind, call in (*calls, (2, "p2p", _to_the_next(clock, whole))):
            seconds = clock.seconds(lambda call=call: (before(), call()))
            yield Timed(kind, 4.0 * whole.numel(), seconds, ranks=ranks)


def _collectives(whole: Tensor, group: ProcessGroup | None, size: int) -> list[_Call]:
    part = torch.zeros(whole.numel() // size, device=whole.device)
    return [
        ("all_reduce", lambda: dist.all_reduce(whole, group=group)),
        ("all_gather", lambda: all_gather_single(whole, part, group=group)),
        ("reduce_scatter", lambda: reduce_scatter_single(part, whole, group=group)),
    ]


def _to_the_next(clock: Clock, sent: Tensor) -> Callable[[], object]:
    rank, size = clock.groups.rank, clock.groups.mesh.world_size
    group, received = clock.groups.world, torch.empty_like(sent)

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def overlap(clock: Clock) -> tuple[float, float, float]:
    """Return the seconds of products, of an all-reduce that takes about as long, and of both at once."""
    num_bytes = 1 << 28 if clock.device.type == "cuda" else 1 << 22
    whole = torch.zeros(num_bytes // 4, device=clock.device)
    group, call = _all_ranks(clock.groups), product(clock)
    exchange = clock.seconds(lambda: dist.all_reduce(whole, group=group))
    alone = clock.seconds(call)
    times = max(1, round(exchange / alone))

    def both() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        for _ in range(times):
            call()
        assert work is not None
        work.wait()

    return times * alone, exchange, clock.seconds(both)
