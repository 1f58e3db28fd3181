"""Warns if graphs of Transformer Engine round gradients that a run without graphs does not round.

    eager, local on a GPU      buffer += gᵀ x             added as it is computed, in the dtype of the buffer
    transformer_engine         buffer += round(gᵀ x)      its graph gives the gradient in the dtype of the weight

Its own way past that (fuse_wgrad_accumulation, into ``main_grad``) is one of its layers, and regions hold none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.regions.weight_gradients import IN_GRAPH, weight_gradients
from planner.saved.lowered import Lowered
from planner.spec.spec import Spec
from planner.tables.rows import Diagnostic


def graph_rounding_warnings(spec: Spec, lowered: Lowered) -> Iterator[Diagnostic]:
    """One row if weights of products in captured regions are less precise than their gradient buffers."""
    if spec.cuda_graphs.impl != "transformer_engine":
        return
    products = {found.name for found in weight_gradients(lowered) if found.how == IN_GRAPH}
    narrow = {
        (p.fqn, buffer.dtype, buffer.gradient_dtype)
        for buffer in lowered.shards.buffers
        for p in buffer.parameters
        if p.fqn in products and buffer.dtype.itemsize < buffer.gradient_dtype.itemsize
    }
    if narrow:
        (_, dtype, of_sum), count = min(narrow, key=str), len({name for name, _, _ in narrow})
        yield Diagnostic(
            "warning",
            f"the gradients of {count} weights in graphs are rounded to {_name(dtype)} in each microbatch and "
            f"summed in {_name(of_sum)}: transformer_engine returns them so; on a GPU, eager steps and impl: "
            "local do not round",
            "cuda_graphs.impl",
            "set impl: local, or accept this rounding difference from eager steps",
        )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
