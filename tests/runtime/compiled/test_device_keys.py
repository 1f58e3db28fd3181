"""Which ranks of a host find each other's graphs in Inductor's cache: those whose GPUs have the same number."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch._inductor.codecache import FxGraphCachePickler
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.compiled.functions import signature_of
from runtime.distributed.devices import Launched, choose_device


class _Piece(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


def keys(num_visible: int, *, virtual: bool = False) -> tuple[int, int]:
    """How many keys 8 ranks of a host have for one graph: of Inductor's cache, and of our lock beside it."""
    graph, mode = fx.symbolic_trace(_Piece()), FakeTensorMode()
    of_cache, of_lock = set(), set()
    for rank in range(8):
        device = choose_device(
            None, Launched(rank, 8, 0 if virtual else rank, 8), cuda_available=True, device_count=num_visible
        )
        with mode:
            x = torch.empty(4, device=device)
        of_cache.add(FxGraphCachePickler(graph).get_hash([x]))
        of_lock.add(repr(signature_of([x])))
    return len(of_cache), len(of_lock)


def test_ranks_that_see_all_gpus_have_a_key_each_and_do_not_wait_for_each_other():
    """The number stands in the code that Inductor makes, so no key of ours could let them share it."""
    assert keys(num_visible=8) == (8, 8)


def test_ranks_that_see_one_gpu_each_share_one_key():
    assert keys(num_visible=1) == (1, 1)


def test_ranks_of_a_virtual_local_rank_share_one_key():
    """torchrun --virtual-local-rank: LOCAL_RANK is 0 on all, and each sees its GPU as the first."""
    assert keys(num_visible=1, virtual=True) == (1, 1)
