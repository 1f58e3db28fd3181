"""Preference data: a row is two answers to one prompt, which stand side by side in a row of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import prepare_samples
from runtime.data.reading import read_tokens, split
from runtime.data.token_batches import token_batches
from runtime.data.tokens import Tokens
from tests.tools.chat_tokenizers import chat_directory, talk

pytest.importorskip("transformers")

PAIR = Instruction(chosen="chosen", rejected="rejected")
OF_TEXTS = Instruction(prompt="prompt", chosen="chosen", rejected="rejected")
TALKS = [{"chosen": talk("hi", "yes"), "rejected": talk("hi", "no, the cat")},
         {"chosen": talk("a", "b", "c?", "sunny"), "rejected": talk("a", "b", "c?", "rain")}]  # fmt: skip
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 2, "micro": 2},
    "inputs": {"input_ids": {"shape": [2, 40], "dtype": "int64"}, "labels": {"like": "input_ids"}},
    "data": {"packing": False},
}


class Made:
    def __init__(self, path: Path) -> None:
        self.path, self.model = path, chat_directory(path / "model", "chatml")

    def tokens(self, rows: list[dict[str, Any]], asked: Instruction) -> Tokens:
        (self.path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        prepare_samples([self.path / "rows.jsonl"], self.path / "pairs.tokens", str(self.model), asked)
        return read_tokens(str(self.path / "pairs.tokens"))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def sample_of(tokens: Tokens, index: int, **changes: Any) -> Any:
    return token_batches(tokens, Spec.load(SPEC | changes)).objective.sample(index, 0)


def test_a_pair_is_one_row_and_each_half_is_the_sample_of_a_conversation(made: Made) -> None:
    single = Instruction(chat="messages", train_on="last")
    alone = made.tokens([{"messages": row[name]} for row in TALKS for name in ("chosen", "rejected")], single)
    flat = SPEC | {"inputs": {"input_ids": {"shape": [40], "dtype": "int64"}, "labels": {"like": "input_ids"}}}
    wanted = [token_batches(alone, Spec.load(flat)).objective.sample(n, 0) for n in range(4)]
    tokens = made.tokens(TALKS, PAIR)
    batches = token_batches(tokens, Spec.load(SPEC))
    assert batches.num_samples == 2
    for index in range(2):
        found = batches.objective.sample(index, 0)
        for which in (0, 1):
            for role in ("tokens", "labels", "attention_mask"):
                assert found[role][which].tolist() == wanted[2 * index + which][role].tolist()
    assert {name: tuple(x.shape) for name, x in batches.batch(0).items()} == dict.fromkeys(SPEC["inputs"], (2, 2, 40))


def test_a_prompt_of_its_own_and_texts_are_the_same_pair(made: Made) -> None:
    by_talks = made.tokens(TALKS[:1], PAIR).ids.tolist()
    of = [{"prompt": p, "chosen": talk("hi", "yes")[1:], "rejected": talk("hi", "no, the cat")[1:]}
          for p in ("hi", talk("hi", "x")[:1])]  # fmt: skip
    assert [made.tokens([row], OF_TEXTS).ids.tolist() for row in of] == [by_talks, by_talks]
    bare = made.tokens([{"prompt": "hi ", "chosen": "yes", "rejected": "no"}], OF_TEXTS)
    single = Instruction(prompt="prompt", answer="answer")
    rows = [{"prompt": "hi ", "answer": answer} for answer in ("yes", "no")]
    assert bare.ids.tolist() == made.tokens(rows, single).ids.tolist()


def test_a_pair_stays_whole_where_one_is_left_out_or_held_out(made: Made) -> None:
    tokens = made.tokens(TALKS, PAIR)
    sizes = [len(ids) for ids in (tokens.ids[: tokens.ends[0]], tokens.ids[tokens.ends[0] : tokens.ends[1]])]
    length = max(sizes)  # of the first pair; both of the second are longer
    inputs = {"input_ids": {"shape": [2, length], "dtype": "int64"}, "labels": {"like": "input_ids"}}
    data = {"packing": False, "overlong": "drop"}
    assert token_batches(tokens, Spec.load(SPEC | {"inputs": inputs, "data": data})).num_samples == 1
    shorter = {"input_ids": {"shape": [2, length - 1], "dtype": "int64"}, "labels": {"like": "input_ids"}}
    with pytest.raises(PlanError, match="in its longest document"):
        token_batches(tokens, Spec.load(SPEC | {"inputs": shorter, "data": data}))
    first, second = split(tokens, 0.5)
    assert second is not None
    assert (len(first.ends), len(second.ends)) == (2, 2)
    assert first.is_paired
    assert sample_of(second, 0)["tokens"].tolist() == sample_of(tokens, 1)["tokens"].tolist()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": talk("hi", "yes"), "rejected": talk("ho", "no")}, "chosen and rejected answer different prompts"),
        ({"chosen": talk("hi", "yes")}, "the row has no list of messages 'rejected'"),
        ({"chosen": "hi yes", "rejected": "hi no"}, "the place at which its answer begins is not known"),
        ({"chosen": talk("hi", "yes"), "rejected": talk("hi", "no")[:1]}, "no message of the assistant to train on"),
        ({"chosen": talk("hi", "yes"), "rejected": talk("hi", "<|im_end|>")}, "holds the special token"),
    ],
    ids=str,
)
def test_a_row_that_is_no_pair_is_refused_and_named(made: Made, row: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        made.tokens([*TALKS, row], PAIR)
    assert "rows.jsonl" in str(error.value)


def test_pairs_and_inputs_that_do_not_fit_are_refused(made: Made) -> None:
    tokens = made.tokens(TALKS, PAIR)
    flat = {"input_ids": {"shape": [40], "dtype": "int64"}, "labels": {"like": "input_ids"}}
    with pytest.raises(PlanError, match=r"as tokens of a pair of samples it needs \[2, length\]"):
        sample_of(tokens, 0, inputs=flat)
    with pytest.raises(PlanError, match="one pair in a row of one length"):
        sample_of(tokens, 0, data={"packing": True})
    alone = made.tokens([{"messages": TALKS[0]["chosen"]}], Instruction(chat="messages"))
    with pytest.raises(PlanError, match=r"as tokens of a text it needs \[length\]"):
        sample_of(alone, 0)
