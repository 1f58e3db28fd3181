"""Random numbers in the graphs of Transformer Engine: the same as the eager ops draw.

    found         every region runs once, to find its draws             draw → generator
    registered    its tracker of generators holds ours: whatever it holds is registered with every graph
    put           before each replay, to the position of the eager ops  (RegionModule.put_generators)

A graph moves its generator only at its capture, so a replay continues from the position that was set.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from runtime.cuda_graphs.te_modules import RegionModule

DISTRIBUTED = "transformer_engine.pytorch.distributed"


def find_draws(module: RegionModule, inputs: Sequence[Tensor], device: torch.device) -> None:
    """Give a region a generator for each of its draws: one for all microbatches."""
    random = module.random
    if random is None:
        return
    random.begin(0, 0)
    with random.watched() as drawn, torch.no_grad():
        module(*inputs)
    module.generators = {draw: torch.Generator(device) for draw in drawn}


@contextmanager
def registered(modules: Sequence[RegionModule]) -> Iterator[None]:
    """Graphs that are captured meanwhile have the generators of these regions, and those that were there."""
    generators = {draw: generator for module in modules for draw, generator in module.generators.items()}
    if not generators:
        yield
        return
    distributed = importlib.import_module(DISTRIBUTED)
    tracker, before = distributed.CudaRNGStatesTracker(), distributed.get_all_rng_states()
    tracker.set_states({**before, **{f"meshwright {draw}": generator for draw, generator in generators.items()}})
    drawing = {id(module.random): module.random for module in modules if module.random is not None}
    for random in drawing.values():
        random.registered = generators
    try:
        yield
    finally:
        for random in drawing.values():
            random.registered = None
        tracker.set_states(before)
