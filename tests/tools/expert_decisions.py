"""All that is decided about experts, for every spelling and family, by which two commits are compared.

    python -m tests.tools.expert_decisions [WORD…]            each layer as it is found and opened: seconds
    python -m tests.tools.expert_decisions --plans [WORD…]    plans too, with their collectives: minutes

Prints JSON: for each case {"layers": ["…"], "graph": "9f…"}, or {"refused": "…"}. Equal graphs are planned and run
alike. Words pick the cases with names that hold one of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from passes.moe.find import find_experts
from passes.moe.open import open_experts
from passes.moe.token_rows import check_places
from passes.partition.sequence.cut import cut_sequence
from passes.program.program import Program, copied
from passes.program.source_lines import where_of
from passes.program.walks import ancestors
from planner import Captured, Plan, PlanError, plan
from planner.captured import prepare
from planner.mesh import Mesh
from planner.spec.spec import Spec
from tests.models import (
    experts,
    hugging_face,
    routed,
    routers,
    selected_rows,
    shared_experts,
    sliced_experts,
    slots,
    sorted_experts,
    stacked_experts,
)
from tests.models.adapted_experts import Added, LowRank, Normed, Widened, adapted
from tests.tools.captures import captured_again
from tests.tools.simulated_mesh import spec_of

Make = Callable[[], nn.Module]
Case = tuple[str, Make, dict[str, Tensor], dict[str, Any]]  # name, model, batch, what the spec says beside
ON = {"ep 2": {"dp": 2, "ep": 2}, "ep 2·tp 2": {"tp": 2, "dp": 2, "ep": 2}, "etp 1": {"tp": 2, "etp": 1}}
OPENED = {  # (mesh, nodes that ep extends over)
    "alone": (Mesh(), 1),
    "ep 2": (Mesh(dp=2, ep=2), 1),
    "ep 4 on 2 nodes": (Mesh(dp=4, ep=4), 2),
    "etp 1": (Mesh(tp=2, etp=1), 1),
    "cp 2·ep 2": (Mesh(cp=2, ep=2), 1),
}
DROPPED = {"dropout": "layout_invariant"}


def spellings() -> Iterator[tuple[str, Make, dict[str, Any]]]:
    """(name, how to make a model, what its spec says beside) of layers that a user may write."""
    kinds: tuple[tuple[Any, Callable[..., nn.Module], Sequence[Any]], ...] = (
        (experts, experts.Layer, experts.WAYS),
        (selected_rows, selected_rows.Selecting, (*selected_rows.WAYS, selected_rows.overwritten)),
        (sliced_experts, sliced_experts.Sliced, sliced_experts.WAYS),
        (stacked_experts, stacked_experts.Stacks, (*stacked_experts.WAYS, *stacked_experts.REFUSED)),
        (slots, slots.Slots, (*slots.WAYS, *slots.REFUSED)),
        (
            sorted_experts,
            sorted_experts.Sorting,
            (*sorted_experts.WAYS, sorted_experts.first_twice, *sorted_experts.REFUSED),
        ),
        (shared_experts, shared_experts.Shared, shared_experts.PLACES),
        (routers, routers.Routed, routers.SCORES),
    )
    for module, layer, ways in kinds:
        for way in ways:
            name = f"{module.__name__.rpartition('.')[2]}.{way if isinstance(way, str) else way.__name__}"
            yield name, lambda layer=layer, way=way: experts.Net(layer(way)), {}
    for kind in (LowRank, Added, Normed, Widened):
        for name, layer in _adapted():
            yield f"adapted.{name} {kind.__name__}", partial(_with_adapter, layer, kind), {}
    for way in (routed.loop, routed.stacks):
        for top_k in (1, 2):
            yield f"routed.{way.__name__} {top_k}", partial(routed.Routed, way, torch.zeros(24, 4), top_k), {}
    for way in (experts.masks, selected_rows.index_add, selected_rows.every_copy):
        yield f"dropping.{way.__name__}", partial(_dropping, way), DROPPED
        yield f"dropping.{way.__name__}, fast", partial(_dropping, way), {}
    yield "blocks.beside_shared", partial(experts.Blocks, partial(experts.Layer, experts.masks), shared=True), {}
    yield "experts.not_understood", experts.not_understood, {}


def _adapted() -> tuple[tuple[str, Make], ...]:
    return (
        ("sorted", lambda: sorted_experts.Sorting(sorted_experts.by_places)),
        ("biased", lambda: stacked_experts.Stacks(stacked_experts.biased)),
        ("masked", lambda: stacked_experts.Stacks(stacked_experts.masked)),
        ("of_pairs", lambda: stacked_experts.Stacks(stacked_experts.of_pairs)),
    )


def _with_adapter(layer: Make, kind: type[nn.Module]) -> nn.Module:
    return experts.Net(adapted(layer(), kind))


def _dropping(way: experts.Way) -> nn.Module:
    layer = selected_rows.Selecting(way) if way in selected_rows.WAYS else experts.Layer(way)
    layer.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.25), nn.Linear(12, 8)) for _ in range(4)
    )
    return experts.Net(layer).train()


def cases(words: Sequence[str]) -> Iterator[Case]:
    """Every spelling and family, in each dtype."""
    batch, of_families = experts.batch(), hugging_face.batch("mixtral")
    found = [(name, make, batch, more) for name, make, more in spellings()]
    found += [(f"family.{n}", partial(hugging_face.made, m), of_families, {}) for n, m in hugging_face.MOE.items()]
    for name, make, given, more in found:
        for dtype in ("float32", "bfloat16", "float16"):
            if not words or any(word in f"{name} {dtype}" for word in words):
                yield f"{name} {dtype}", make, given, more | {"precision": {"parameters": dtype}}


def opened(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """The layers of a model on each mesh, and the graph with their exchanges."""
    name, make, batch, more = case
    torch.manual_seed(3)
    spec = Spec.load(spec_of(batch, {}, **more))
    prepared = prepare(captured_again(make(), spec), spec)
    for title, (mesh, nodes) in OPENED.items():
        yield f"{name}, {title}", _or_refused(lambda mesh=mesh, nodes=nodes: _opened(prepared.program, mesh, nodes))


def _opened(captured: Program, mesh: Mesh, nodes: int) -> dict[str, Any]:
    program = copied(captured)
    found = find_experts(program)
    cut_sequence(program, mesh.cp, found)
    made = open_experts(program, found, mesh, nodes=nodes)
    check_places(program)
    words = _words(program.graph.graph)
    read = ancestors([program.graph.graph.output_node()])
    graph = _digest(*sorted(words[node.name] for node in read))
    return {"layers": [_renamed(str(part), words) for part in (*made.layers, *made.doubts)], "graph": graph}


def planned(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a plan says of experts, and a digest of all of it."""
    name, make, batch, more = case
    captured: dict[int, Captured] = {}
    for title, mesh in ON.items():
        dp = mesh.get("dp", 1)
        spec = spec_of({key: torch.cat([x] * dp) for key, x in batch.items()}, mesh, **more)
        if dp not in captured:
            torch.manual_seed(3)
            captured[dp] = captured_again(make(), spec)
        yield f"{name}, {title}", _or_refused(lambda spec=spec, dp=dp: _rows(plan(captured[dp], spec)))


def _rows(made: Plan) -> dict[str, Any]:
    return {
        "how": [f"{row.how}; {row.sends}; {row.bytes}" for row in made.experts],
        "notes": [str(row) for row in made.diagnostics if "expert" in row.what],
        "plan": _digest(json.dumps(made.to_dict(), sort_keys=True)),
        "collectives": [f"{n} × {row}" for row, n in sorted(Counter(map(str, made.collectives)).items())],
    }


def _or_refused(decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return decide()
    except PlanError as error:
        return {"refused": str(error)}


def _words(graph: fx.Graph) -> dict[str, str]:
    """Node → a digest of all that later steps read of it and of what it is made of: not of its name and place."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        val, kept = node.meta.get("val"), [str(node.meta.get(key)) for key in ("grad", "domain", "draw")]
        seen = [(tuple(x.shape), x.dtype) for x in tree_leaves(val) if isinstance(x, Tensor)]
        read = _renamed(repr(fx.map_arg((node.args, node.kwargs), lambda n: n.name)), found)
        target = getattr(node.target, "__name__", node.target)
        found[node.name] = _digest(f"{node.op} {target} {read} {seen} {kept} {where_of(node)}")
    return found


def _renamed(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"'(\w+)'", lambda found: words.get(found[1], found[0]), text)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    decide = planned if "--plans" in sys.argv else opened
    words = [word for word in sys.argv[1:] if word != "--plans"]
    print(json.dumps(dict(row for case in cases(words) for row in decide(case)), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
