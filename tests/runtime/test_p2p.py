"""Messages between stages: order, layout in memory, and receives that are posted ahead."""

from __future__ import annotations

import pytest
import torch

from passes.base import Boundary
from planner.mesh import Mesh
from planner.types import I
from runtime.groups import Groups, open_groups
from runtime.launch import launch
from runtime.p2p import MAX_SENDS_IN_FLIGHT, Message, Transport

WIDE = Boundary("wide", (3, 4), torch.float64, True, I)
KIND = Boundary("kind", (2,), torch.int64, False, I)
FLAG = Boundary("flag", (2,), torch.bool, False, I)
ALL = (WIDE, KIND, FLAG)


def values(microbatch: int) -> list[torch.Tensor]:
    wide = torch.arange(12, dtype=torch.float64).view(4, 3).t() + microbatch
    return [wide, torch.tensor([microbatch, -1]), torch.tensor([True, False])]


def exchange() -> list[list]:
    """Two pp ranks: stage 0 sends many microbatches, stage 1 receives them in reverse and sends gradients back."""
    groups = open_groups(Mesh(pp=2), {}, [], timeout_seconds=60)
    transport, count = Transport(groups, 2), 3 * MAX_SENDS_IN_FLIGHT
    received = []
    if groups.pp_rank == 0:
        for microbatch in range(count):
            transport.post(Message("B", 0, microbatch), ALL)
            transport.send(Message("F", 0, microbatch), values(microbatch))
        received = [transport.receive(Message("B", 0, m), ALL)[0].tolist() for m in range(count)]
    else:
        for microbatch in range(count):
            transport.post(Message("F", 0, microbatch), ALL)
        for microbatch in reversed(range(count)):
            arrived = transport.receive(Message("F", 0, microbatch), ALL)
            received.append([t.tolist() for t in arrived])
            transport.send(Message("B", 0, microbatch), [(arrived[0].t().contiguous() * 2).t()])
    transport.drain()
    groups.close()
    return received


@pytest.mark.slow
def test_tensors_of_every_kind_cross_and_only_those_with_gradients_come_back():
    gradients, arrived = launch(exchange, 2, timeout_seconds=60)
    count = 3 * MAX_SENDS_IN_FLIGHT
    assert arrived == [[t.tolist() for t in values(m)] for m in reversed(range(count))]
    assert gradients == [(values(m)[0] * 2).tolist() for m in range(count)]


def test_stages_of_one_rank_hand_their_tensors_over():
    transport = Transport(Groups(Mesh(), 0, torch.device("cpu"), None), 2)  # pyright: ignore[reportArgumentType]
    sent = values(0)
    transport.send(Message("F", 0, 0), sent)
    arrived = transport.receive(Message("F", 0, 0), ALL)
    assert all(a.data_ptr() == s.data_ptr() for a, s in zip(arrived, sent, strict=True))
    transport.drain()
