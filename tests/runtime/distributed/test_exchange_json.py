"""Values go from rank to rank as JSON: nothing that a rank receives is unpickled."""

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from passes.errors import PlanError, RunError, Where
from planner.mesh import Mesh
from planner.pipeline.actions import Action
from planner.pipeline.links import Message
from planner.sharding.boxes import Box
from runtime.checkpoint.manifest import FileEntry
from runtime.checkpoint.pieces import Record
from runtime.distributed import agreement
from runtime.distributed.agreement import agree, all_gather_json, broadcast_json, gather_json, of_kind
from runtime.distributed.opening import open_groups
from runtime.pipeline.nonfinite import NonFinite, Seen
from runtime.profiling.trace import Span
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

OF_OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "_object_to_tensor", "_tensor_to_object"),
}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
NONE_COMES_FROM_ELSEWHERE = {  # memory without a name, from a process to the one that started it: no other reaches it
    "runtime/distributed/rank_process.py",
    "runtime/fuzz/forks.py",  # a pipe from a fork to the process that made it
    "planner/capture/model_fingerprint.py",  # writes alone: the bytes are hashed
}


def unsafe(source: str) -> Iterator[str]:
    """What reads objects that came from elsewhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            yield from (name for name in names if name.partition(".")[0] in UNSAFE_MODULES or name in OF_OBJECTS)
        elif isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("weights_only") != "True" and given.get("allow_pickle") != "False":
                yield ast.unparse(node.func)


@pytest.mark.parametrize(
    "line",
    [
        "dist.all_gather_object(a, b)",
        "from torch.distributed import gather_object",
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_each_way_to_unpickle_is_seen(line):
    assert list(unsafe(line))


def test_no_exchange_unpickles():
    files = [file for house in ("planner", "passes", "runtime") for file in (ROOT / house).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): [*unsafe(file.read_text())] for file in files}
    assert len(files) > 300
    assert {name for name, calls in found.items() if calls} == NONE_COMES_FROM_ELSEWHERE


def over_gloo() -> list[object]:
    with_surrogate = "caf\udce9"
    groups = open_groups(Mesh(tp=2), {}, [], timeout_seconds=HANG_SECONDS)
    own = {"rank": groups.rank, "text": with_surrogate * (1 + 5 * groups.rank), "seconds": 0.1 + groups.rank}
    found: list[object] = [
        all_gather_json(groups, own),
        gather_json(groups, own, lambda given: given["rank"]),
        broadcast_json(groups, [groups.rank, None]),
    ]
    with pytest.raises(PlanError) as caught:
        agree(groups, PlanError("no", where=Where(file="a.py", line=3), fix="yes") if groups.rank else None)
    found.append(str(caught.value))
    groups.close()
    return found


@pytest.mark.slow
def test_values_of_all_ranks_come_as_they_were():
    first, second = Ranks(2, "processes").run(over_gloo)
    words = "caf\udce9"
    both = [{"rank": r, "text": words * (1 + 5 * r), "seconds": 0.1 + r} for r in range(2)]
    error = "no\n  at:  a.py:3\n  fix: yes"
    assert first == [both, [0, 1], [0, None], f"rank 1: {error}"]
    assert second == [both, [], [0, None], error]


def test_a_rank_alone_reads_its_own():
    groups = open_groups(Mesh(), {}, [], device="cpu")
    assert all_gather_json(groups, "a", str.upper) == gather_json(groups, "a", str.upper) == ["A"]
    assert broadcast_json(groups, "a", str.upper) == "A"


@pytest.mark.parametrize(
    "content",
    [b"{", b"\x80\x04\x95", b"[" * 100_000, b'{"a": 1}', b"null", b"9" * 5000],
    ids=["cut", "pickle", "deep", "other", "nothing", "long"],
)
def test_bytes_that_are_no_such_value_are_one_error_that_names_the_rank(content):
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(RunError, match="rank 3 sent a value of another exchange"):
        agreement._read(3, sent, of_kind(Seen))


@pytest.mark.parametrize("sizes", [[5, 1 << 40], [5, -1], [5, 0]], ids=str)
def test_no_memory_is_taken_for_more_than_can_be_sent(sizes):
    with pytest.raises(PlanError, match=r"rank 1 has -?\d+ bytes for one exchange"):
        agreement._require_small(sizes)


BAD = NonFinite("forward", "blocks.0", "NaN", "softmax", Where("blocks.0", "a.py", 3, "x"), 1, 0, 2, (4, 5), (1, 2))
SPAN = Span("F0.0", "action", 0.1, 1 / 3, 2, 0, Action("F", 0, 0))
HELD = (("w", "main", "float32", Box((0, 1), (2, 3))), ("scalar", "main", "float32", Box((), ())))


def through_json(value: object, read: object) -> object:
    return agreement._read(0, agreement._content_of(value), read)  # pyright: ignore[reportArgumentType]


def test_what_ranks_exchange_is_the_same_after_json():
    seen = Seen((BAD, replace(BAD, where=None)), (BAD,), frozenset({3, 1}))
    assert through_json(seen, of_kind(Seen)) == seen
    for span in (SPAN, Span("wait", "wait", 0.5, 0.75, message=Message("B", 1, 2))):
        again = through_json(span, of_kind(Span))
        assert isinstance(again, Span)
        assert again == span
        assert (type(again.action), type(again.message)) == (type(span.action), type(span.message))
    file = FileEntry(name="rank-00000.safetensors", bytes=9, checksum="0" * 32)
    for record in (Record(file, HELD, 3, {"w": 2}), Record(None, ())):
        assert through_json(record, of_kind(Record)) == record
