"""Plan files that were made to do harm, or changed at random: each is one error, and nothing in it runs."""

import copy
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.errors import PlanError
from planner import Plan
from planner.files.values import Reader
from planner.report.sections import sections
from planner.saved_plan.plan_file import FORM, seal, unseal
from tests.models.plannable import build, spec_of
from tests.models.tiny import planned
from tests.tools.captures import plan_again
from tests.tools.mutations import mutants, peak_bytes, survivors

CALL = "__import__('os').mkdir('harmed')"
TEXTS = (f"targets, zz={CALL}", f"x={CALL}", f"x):\n    {CALL}\n    return (", f'"); {CALL}; ("', CALL, "lambda", "a b")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "plan.pt"
    plan_again(build("inner 33"), spec_of("inner 33", mesh={"tp": 2})).save(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "plan.pt"
    assert not Path("harmed").exists()


def refused(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert "plan.pt" in str(caught.value)
    return caught.value.what


def graph_of(content: dict[str, Any]) -> list[Any]:
    return next(
        part["graph"] for row in content["objects"] for part in row[2] if isinstance(part, dict) and "graph" in part
    )


def calls(content: dict[str, Any], op: str) -> list[Any]:
    return next(row for row in graph_of(content) if row[0] == op)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("place", ["placeholder", "name", "keyword"])
def test_a_text_that_is_no_identifier_reaches_no_source(whole: bytes, path: Path, place: str, text: str) -> None:
    content, tensors = unseal(FORM, whole)
    if place == "placeholder":
        calls(content, "placeholder")[2] = text
    elif place == "name":
        calls(content, "call_function")[1] = text
    else:
        calls(content, "call_function")[4] = {"dict": [[text, 1]]}
    path.write_bytes(seal(FORM, content, tensors))
    assert "is no name of a value" in refused(path)


@pytest.mark.parametrize("op", ["get_attr", "call_method", "call_module", "root"])
def test_a_graph_only_calls_functions(op: str) -> None:
    with pytest.raises(ValueError, match="is no call of a plan"):
        Reader([], [], {}).read({"graph": [[op, "x", "tofile", {"tuple": ["harmed"]}, {"dict": []}, []]]})


def test_a_changed_byte_is_told(whole: bytes, path: Path) -> None:
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "damaged, or is no saved plan" in refused(path)


def sealed(text: bytes, rest: bytes = b"") -> bytes:
    whole = len(text).to_bytes(8, "little") + text + rest
    return f"{FORM} {hashlib.sha256(whole).hexdigest()}\n".encode() + whole


FILES = {
    "no versions": sealed(b'{"content": {}, "tensors": {}}'),
    "no JSON": sealed(b"["),
    "another kind": sealed(b'{"content": [], "tensors": {}}'),
    "deep": sealed(b'{"content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a large number": sealed(b'{"content": 9223372036854775808, "tensors": {}}'),
    "a huge tensor": sealed(b'{"content": {}, "tensors": {"0": ["torch.float32", [1099511627776, 1099511627776]]}}'),
    "a size below 0": sealed(b'{"content": {}, "tensors": {"0": ["torch.float32", [-4]]}}'),
    "bytes behind": sealed(b'{"content": {}, "tensors": {}}', b"more"),
    "no sizes": f"{FORM} {hashlib.sha256(b'').hexdigest()}\n".encode(),
    "empty": b"",
    "zeros": bytes(4096),
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", FILES)
def test_another_file_is_one_error(path: Path, name: str) -> None:
    path.write_bytes(FILES[name])
    assert "the plan is damaged" in refused(path)


@pytest.mark.parametrize("part", ["lengths", "objects", "texts", "model", "hub"])
def test_a_file_without_a_part_is_one_error(whole: bytes, path: Path, part: str) -> None:
    content, tensors = unseal(FORM, whole)
    path.write_bytes(seal(FORM, content | {part: []}, tensors))
    assert "the plan is damaged" in refused(path)
    del content[part]
    path.write_bytes(seal(FORM, content, tensors))
    assert "the plan is damaged" in refused(path)


def test_a_pipe_a_directory_and_a_file_without_end_are_not_read(path: Path) -> None:
    os.mkfifo(path)
    assert "a pipe" in refused(path)
    path.unlink()
    path.mkdir()
    assert "a directory" in refused(path)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(9 << 30)  # takes no room on the disk
    assert "is larger than" in refused(path)


def test_a_graph_900_deep_is_one_error(whole: bytes, path: Path) -> None:
    content, _ = unseal(FORM, whole)
    deep = b'{"tuple": [' * 900 + b"1" + b"]}" * 900
    calls(content, "call_function")[3] = "deep"
    text = json.dumps({"content": content, "tensors": {}}).encode().replace(b'"deep"', deep)
    path.write_bytes(sealed(text))
    assert "the plan is damaged" in refused(path)


VALUES: list[Any] = [
    None, -1, 2**62, 1.5, "x", [], {}, {"node": "x"}, {"object": 10**6}, {"text": -1}, {"device": "x"},
    {"dtype": "load"},
    {"enum": ["os", "environ", "x"]}, {"named": ["subprocess", "Popen", [["mkdir", "harmed"]]]}, {"float": "x"},
    {"like": [[2**40, 2**40], [1, 1], 0, "float32", False]}, {"tensor": "z"}, {"a": 1, "b": 2}, {"graph": []}, *TEXTS,
]  # fmt: skip


def changed(content: Any, seed: int) -> Any:
    """One value of the file replaced, removed or given twice."""
    draw, content = random.Random(seed), copy.deepcopy(content)
    holder, value = content, content[draw.choice(["objects", "objects", "lengths", "model", "hub"])]
    while isinstance(value, (dict, list)) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        holder, value = value, value[key]
    if holder is content:
        return content
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    return content


@pytest.mark.parametrize("start", [0, pytest.param(60, marks=pytest.mark.thorough)])
def test_a_changed_value_is_read_or_is_one_error(whole: bytes, path: Path, start: int) -> None:
    content, tensors = unseal(FORM, whole)
    num_refused = 0
    for seed in range(start, start + (60 if not start else 300)):
        path.write_bytes(seal(FORM, changed(content, seed), tensors))
        try:
            Plan.load(path)
        except PlanError:
            num_refused += 1
    assert num_refused > 20


def test_a_plan_runs_no_function_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "rate.py").write_text("def rate(step):\n    return 1.0\n")
    kind = f"{tmp_path / 'rate.py'}:rate"
    made = plan_again(build("inner 33"), spec_of("inner 33", mesh={}, optimizer={"schedule": {"kind": kind}}))
    made.save(tmp_path / "plan.pt")
    assert "names a function that a run would import" in refused(tmp_path / "plan.pt")
    assert Plan.load(tmp_path / "plan.pt", own_functions=True) == made


def test_buffers_of_any_dtype_come_back() -> None:
    given = {
        "complex": torch.randn(2, 3, dtype=torch.complex64).conj(),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "of a transposed": torch.arange(6.0).view(2, 3).t(),
    }
    _, found = unseal(FORM, seal(FORM, None, given))
    assert list(found) == list(given)
    for name, value in given.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].to(torch.complex64).tolist() == value.to(torch.complex64).tolist()


# ---- whatever is done to a plan's file, it loads and prints, or is one PlanError


def check(count: int, seed: int, path: Path) -> int:
    planned(tp=2, pp=2).save(path)
    texts = list(mutants(path.read_text(), count, seed, json.loads, json.dumps))
    before = peak_bytes()

    def load(text: str) -> str:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        loaded = Plan.load(path)
        text = loaded.describe() if len(text) % 8 == 0 else ""  # drawing tables is slow, what they hold is what counts
        return str(sections(loaded)) + str(sections(loaded, full=True)) + text + loaded.hash()

    good, bad = survivors(texts, load)
    assert not bad, f"{len(bad)} of {len(texts)}:\n" + "\n".join(bad[:5])
    assert peak_bytes() - before < 1 << 30
    return len(good)


def test_mutated_plans_load_or_are_one_error(tmp_path):
    assert 5 < check(150, 1, tmp_path / "plan.json") < 75


@pytest.mark.thorough
@pytest.mark.slow
def test_two_thousand_mutated_plans_load_or_are_one_error(tmp_path):
    assert 50 < check(2_000, 2, tmp_path / "plan.json") < 1_000
