"""Bytes and files of the library `tokenizers`: ids, and marks of words and sentences, however a document is cut."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError
from runtime.data.reading import read_tokens
from runtime.data.text import encoders as tokenizer_file
from runtime.data.text.encoders import ByteEncoder, TokenizerFile, marks_of
from runtime.data.tokens import SENTENCE, WORD, TextPart
from tests.tools.texts import bpe_file, word_piece_file

TEXTS = st.text(alphabet="ab.!? \n\t", max_size=40).map(str.encode)


def begun(text: bytes, bit: int) -> list[int]:
    return np.flatnonzero(ByteEncoder().encode(text).marks & bit).tolist()


def test_words_begin_after_white_space() -> None:
    piece = ByteEncoder().encode(b"one two,  three\n")
    assert np.flatnonzero(piece.marks & WORD).tolist() == [0, 4, 10]
    assert piece.num_words == 3
    assert piece.ids.tobytes() == b"one two,  three\n"


def test_sentences_begin_after_stops_and_between_paragraphs() -> None:
    assert begun(b"a b. c! d? e.f g\nh\n\ni\n j", SENTENCE) == [0, 5, 8, 11, 20, 23]


@settings(deadline=None)
@given(TEXTS)
def test_marks_are_those_of_a_plain_search(text: bytes) -> None:
    words = [found.start() for found in re.finditer(rb"\S+", text)]
    sentences = [at for at in words if not text[:at].strip() or re.search(rb"([.!?]\s+|\n\s+)$", text[:at])]
    assert begun(text, WORD) == words
    assert begun(text, SENTENCE) == sentences


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 40), max_size=5))
def test_pieces_give_what_the_whole_gives(text: bytes, cuts: list[int]) -> None:
    whole, encoder = ByteEncoder().encode(text), ByteEncoder()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [encoder.encode(text[a:b], False) for a, b in pairwise(places)]
    assert np.concatenate([piece.marks for piece in pieces]).tolist() == whole.marks.tolist()
    assert sum(piece.num_words for piece in pieces) == whole.num_words


tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bpe_file(tmp_path_factory.mktemp("bpe") / "tokenizer.json"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(word_piece_file(tmp_path_factory.mktemp("pieces") / "tokenizer.json"))


def begun_at(text: str, offsets: list[tuple[int, int]], bit: int) -> list[int]:
    return np.flatnonzero(marks_of(text, np.array(offsets).reshape(-1, 2))[0] & bit).tolist()


def test_a_token_that_holds_the_first_character_of_a_word_begins_it() -> None:
    text = "ab cd, ef"
    assert begun_at(text, [(0, 1), (1, 2), (2, 5), (5, 6), (6, 9)], WORD) == [0, 2, 4]
    assert begun_at(text, [(0, 2), (3, 5), (5, 6), (7, 8), (8, 9)], WORD) == [0, 1, 3]
    assert begun_at(text, [(0, 9)], WORD) == [0]


def test_of_tokens_that_share_a_character_the_first_begins_the_word() -> None:
    assert begun_at("é x", [(0, 1), (0, 1), (1, 2), (2, 3)], WORD) == [0, 3]


def test_a_word_that_a_tokenizer_dropped_is_begun_by_no_token() -> None:
    assert begun_at("ab cd ef", [(0, 2), (6, 8)], WORD) == [0, 1]


@settings(deadline=None)
@given(st.text(alphabet="ab.!? \n\té", max_size=40))
def test_marks_of_single_characters_are_those_of_a_plain_search(text: str) -> None:
    offsets = [(i, i + 1) for i in range(len(text))]
    sentences = [
        found.start()
        for found in re.finditer(r"\S+", text)
        if not text[: found.start()].strip() or re.search(r"([.!?]\s+|\n\s+)$", text[: found.start()])
    ]
    assert begun_at(text, offsets, WORD) == [found.start() for found in re.finditer(r"\S+", text)]
    assert begun_at(text, offsets, SENTENCE) == sentences


def test_ids_are_those_of_the_library_and_an_end_token_closes_each_document(bpe: str, tmp_path: Path) -> None:
    texts = {"a": "the cat sat. Ünïcode ends\n", "b": "a dog, the best"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tokens, alone = read_tokens(str(tmp_path), bpe), tokenizers.Tokenizer.from_file(bpe)
    end = alone.token_to_id("<|endoftext|>")
    assert tokens.ids.tolist() == [i for text in texts.values() for i in [*alone.encode(text).ids, end]]
    assert tokens.words.tolist() == [5, 4]
    assert int((tokens.marks & WORD).astype(bool).sum()) == 9
    assert tokens.tokenization.special == {"end": end}
    assert tokens.tokenization.vocabulary_size == alone.get_vocab_size()
    assert tokens.ids.dtype == np.uint16


def test_special_tokens_are_known_by_their_usual_spellings(pieces: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat [MASK]")
    tokens = read_tokens(str(tmp_path / "text"), pieces)
    assert tokens.tokenization.special == {"padding": 0, "class": 2, "separator": 3, "mask": 4}
    assert len(tokens.ids) == tokens.ends[-1]  # no token ends a document here
    assert TokenizerFile(pieces, end="[SEP]").tokenization.special["end"] == 3


def test_settings_that_cut_or_pad_are_not_taken_from_the_file(bpe: str, tmp_path: Path) -> None:
    """A tokenizer of a model is often saved with the longest sequence of the model: documents are longer."""
    cutting = tokenizers.Tokenizer.from_file(bpe)
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    cutting.save(str(tmp_path / "cutting.json"))
    (tmp_path / "text").write_text("the cat sat on the mat " * 20)
    whole = read_tokens(str(tmp_path / "text"), bpe)
    assert read_tokens(str(tmp_path / "text"), str(tmp_path / "cutting.json")).ids.tolist() == whole.ids.tolist()


def test_a_document_in_parts_is_cut_as_a_whole(bpe: str) -> None:
    text = "the cat Ünïcode sat on".encode()
    encoder, file = TokenizerFile(bpe), Path("text")
    (whole,) = encoder.pieces([TextPart(text, True, file)])
    (parts,) = encoder.pieces([TextPart(text[:9], False, file), TextPart(text[9:], True, file, 9)])
    assert parts.ids.tolist() == whole.ids.tolist()
    assert parts.marks.tolist() == whole.marks.tolist()


def test_a_directory_of_a_model_stands_for_its_tokenizer(bpe: str) -> None:
    found, wanted = TokenizerFile(str(Path(bpe).parent)).tokenization, TokenizerFile(bpe).tokenization
    assert (found.vocabulary_size, found.special) == (wanted.vocabulary_size, wanted.special)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a valid tokenizer"),
        ("{}", "is not a valid tokenizer"),
        ("not JSON", "is not a valid tokenizer"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "tokenizer"),
        ("[1, 2]", "is not a valid tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_error(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "wrong.json").write_text(content)
    with pytest.raises(PlanError, match=words) as error:
        TokenizerFile(str(tmp_path / "wrong.json"))
    assert "wrong.json" in error.value.what
    assert len(str(error.value).splitlines()) == 3


def test_bad_arguments_are_one_error_each(bpe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"no tokenizer file no\.json"):
        TokenizerFile("no.json")
    with pytest.raises(PlanError, match="has no token 'NONE'"):
        TokenizerFile(bpe, end="NONE")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(PlanError, match="directory"):
        TokenizerFile(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PlanError, match="needs the package tokenizers"):
        TokenizerFile(bpe)


def test_text_that_is_not_utf_8_is_told_by_file_and_byte(bpe: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"the cat s\xe9t")
    with pytest.raises(PlanError, match=r"latin is not UTF-8: .*0xe9") as error:
        read_tokens(str(tmp_path / "latin"), bpe)
    assert str(error.value.where).endswith("latin, byte 9")
    assert len(read_tokens(str(tmp_path / "latin")).ids) == 12  # as bytes it is a text


def test_a_document_too_long_to_be_cut_whole_is_refused(bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "MOST_BYTES", 10)
    part = TextPart(b"the cat ", False, Path("long"))
    with pytest.raises(PlanError, match="a document of long is longer"):
        list(TokenizerFile(bpe).pieces([part, part]))


def test_mutated_tokenizer_files_load_or_give_one_error(bpe: str, tmp_path: Path) -> None:
    values = json.loads(Path(bpe).read_text())
    for number, (key, value) in enumerate((k, v) for k in values for v in (None, 7, "x", [], {}, [None])):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({**values, key: value}))
        try:
            found = TokenizerFile(str(path))
        except PlanError as error:
            assert path.name in error.what  # noqa: PT017
        else:
            assert found.tokenization.vocabulary_size > 0
