"""Graphs on several ranks give what the same layout gives without; parameters are there before a replay reads them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.distributed.launch import launch
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.in_place import all_gather
from tests.tools.graphed_runs import Trained, differences, engine_of, figures, planned, train

INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "pp": 2}, {"pipeline": {"schedule": "gpipe"}}),
    ({"tp": 2, "dp": 2}, SEQUENCE | {"optimizer": {"bucket_size": 5000}}),
    ({"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED | SEQUENCE),
]
# (layout, scopes): what differs between families is in the regions, what differs between layouts is around them
CASES = {
    "gpt2-dropout": [(i, [["attn"], [], ["full_iteration"]]) for i in range(4)],
    "llama": [(0, [["attn", "mlp"]]), (3, [["mlp"], ["full_iteration"]])],
    "t5": [(0, [[], ["full_iteration"]])],
}


def train_layouts(name: str) -> list[list[str]]:
    """On this rank, for each layout, where its graphs differ from the same layout without."""
    found = []
    for layout, scopes in CASES[name]:
        mesh, sections = LAYOUTS[layout]
        with (made := engine_of(name, None, mesh=mesh, **sections))[0] as engine:
            eager = train(engine, made[1], 2)
        for scope in scopes:
            if name == "t5":  # without regions, linears of both blocks that read the encoder are one op: its own order
                with (made := engine_of(name, scope, captures=False, mesh=mesh, **sections))[0] as engine:
                    eager = train(engine, made[1], 2)
            with (made := engine_of(name, scope, mesh=mesh, **sections))[0] as engine:
                found.append(differences(eager, train(engine, made[1], 2)))
                assert figures(engine) == planned(engine, steps=2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_with_graphs_give_what_they_give_without(name):
    for found in launch(train_layouts, 4, name, timeout_seconds=280):
        assert found == [[] for _, scopes in CASES[name] for _ in scopes]


def train_behind_late_gathers(scope: list[str] | None, hooks: bool) -> Trained:
    """Two steps on two dp ranks; updated parameters are gathered when somebody waits for them, and not before."""

    def start_parameter_gather(self: GradientBuffers) -> None:
        for *place, bucket in reversed(self._order):
            waiting = SimpleNamespace(wait=partial(all_gather, bucket.parameters, bucket.own_parameters, group=group))
            self._gathers[place[0], place[1]] = waiting

    sections: dict[str, Any] = {"mesh": {"dp": 2}, "optimizer": {"bucket_size": 5000}}
    with (made := engine_of("gpt2", scope, **sections))[0] as engine, pytest.MonkeyPatch.context() as patch:
        group = engine.optimizer.buffers.data_parallel.group
        patch.setattr(GradientBuffers, "start_parameter_gather", start_parameter_gather)
        assert engine.program.gate is not None
        if not hooks:
            engine.program.gate.wait = None
        return train(engine, made[1], 2)


@pytest.mark.slow
def test_parameters_are_waited_for_before_a_replay_reads_them():
    runs = [launch(train_behind_late_gathers, 2, *given, timeout_seconds=120) for given in LATE]
    eager, graphed, in_one, without_hooks = (run[0] for run in runs)
    assert differences(eager, graphed) == []
    assert differences(eager, in_one) == []
    assert differences(eager, without_hooks)


LATE: list[tuple[list[str] | None, bool]] = [
    (None, True),
    (["attn", "mlp"], True),
    (["full_iteration"], True),
    (["attn", "mlp"], False),
]
