"""Token files: what was written is read, whatever the text; what is damaged is told in one error, and never crashes."""

import json
import random
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from runtime.data.reading import gathered, read_tokens
from runtime.data.text.documents import parts
from runtime.data.text.encoders import ByteEncoder
from runtime.data.token_file import BEGIN, Header, check_content, is_token_file, open_token_file
from runtime.data.token_writer import TokenWriter, prepare
from runtime.data.tokens import Piece, Tokenization, Tokens
from tests.tools.examples import examples

ARRAYS = ("ids", "marks", "ends", "words")


def written(path: Path, pieces: list[Piece], how: Tokenization) -> Tokens:
    with TokenWriter(path, how) as writer:
        writer.add(pieces)
        writer.note_read(123)
        writer.finish()
    return read_tokens(str(path))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of two texts."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "a").write_text("One two. Three.")
    (folder / "b").write_text("four")
    prepare(partial(parts, [folder / "a", folder / "b"]), folder / "tokens", ByteEncoder())
    return folder / "tokens"


@examples(30)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 299), max_size=5), min_size=1, max_size=3), min_size=1, max_size=9),
    st.sampled_from([300, 65536, 65537]),
    st.booleans(),
)
def test_a_file_gives_what_memory_would_hold(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], vocabulary: int, has_end: bool
) -> None:
    how = Tokenization("some", vocabulary, {"end": 7} if has_end else {})
    pieces = [
        Piece(np.array(ids, np.uint32), np.ones(len(ids), np.uint8), len(ids), i == len(document) - 1)
        for document in documents
        if any(document)
        for i, ids in enumerate(document)
    ]
    path = tmp_path_factory.mktemp("file") / "tokens"
    if not pieces:
        with pytest.raises(PlanError, match="the text is empty"):
            written(path, pieces, how)
        assert list(path.parent.iterdir()) == []
        return
    found, wanted = written(path, pieces, how), gathered("", how, pieces)
    for name in ARRAYS:
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist()
    assert found.tokenization == how
    assert found.largest == wanted.largest == max(found.ids.tolist())
    assert found.ids.dtype == (np.uint32 if vocabulary > 65536 else np.uint16)
    check_content(path)


def test_the_layout_of_a_file_does_not_change(small: Path) -> None:
    content = small.read_bytes()
    magic, version, length, _ = struct.unpack_from("<8sIIQ", content)
    assert (magic, version) == (b"\x93MWTOKEN", 1)
    assert_expected_inline(
        json.dumps(json.loads(content[24 : 24 + length]), indent=1),
        """\
{
 "tokens": 21,
 "documents": 2,
 "words": 4,
 "bytes": 19,
 "dtype": "uint8",
 "largest": 119,
 "tokenization": "bytes",
 "vocabulary_size": 256,
 "special": {
  "end": 0,
  "class": 1,
  "separator": 28,
  "mask": 26,
  "padding": 0
 },
 "content": {
  "ids": "1dcca21911dbf5b9b1f9b1577e3db74f",
  "marks": "f1e2119d1f073074683084ff520c1066",
  "ends": "c9e984c634f39987520361cf6c24d70a",
  "words": "8cc0aa138adba594eff18a50225e3316"
 }
}""",
    )
    assert content[4096 : 4096 + 21] == b"One two. Three.\0four\0"
    assert list(content[4160 : 4160 + 21]) == [3, 0, 0, 0, 1, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert np.frombuffer(content[4224:4240], "<i8").tolist() == [16, 21]
    assert np.frombuffer(content[4288:4304], "<i8").tolist() == [3, 1]
    assert len(content) == 4352


def test_large_files_are_not_read_into_memory(small: Path) -> None:
    assert all(isinstance(getattr(read_tokens(str(small)), name).base, np.memmap) for name in ARRAYS)


def test_identity_is_that_of_the_content(small: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("One two. Three.")
    (tmp_path / "b").write_text("five")
    files = [tmp_path / "a", tmp_path / "b"]
    prepare(partial(parts, files), tmp_path / "tokens", ByteEncoder())
    assert read_tokens(str(tmp_path / "tokens")).identity != read_tokens(str(small)).identity
    files[1].write_text("four")
    prepare(partial(parts, files), tmp_path / "again", ByteEncoder())
    assert read_tokens(str(tmp_path / "again")).identity == read_tokens(str(small)).identity


def resealed(content: bytes, **changes: object) -> bytes:
    """The file with another header, as a foreign writer could have made it."""
    length = struct.unpack_from("<I", content, 12)[0]
    text = json.dumps({**json.loads(content[24 : 24 + length]), **changes}).encode()
    prelude = struct.pack("<8sIIQ", content[:8], 1, len(text), xxhash.xxh3_64_intdigest(text))
    return (prelude + text).ljust(BEGIN, b"\0") + content[BEGIN:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:-1], "is truncated: it has 4351 bytes, 4352 are expected"),
        (lambda c: c[:100], "is truncated: it has 100 bytes"),
        (lambda c: c[:4], "is truncated: it has 4 bytes"),
        (lambda c: c + b"\0", "is damaged: it has 4353 bytes, 4352 are expected"),
        (lambda c: c[:8] + struct.pack("<I", 3) + c[12:], "is of version 3; this meshwright reads up to 2"),
        (lambda c: c[:8] + struct.pack("<I", 2) + c[12:], "its header is of another version"),
        (lambda c: c[:40] + b"x" + c[41:], "the checksum of its header does not match"),
        (lambda c: c[:4224] + struct.pack("<q", 21) + c[4232:], "the ends of its documents are not in ascending order"),
        (lambda c: c[:4232] + struct.pack("<q", 20) + c[4240:], "its last document ends at 20, not at 21"),
        (lambda c: resealed(c, tokens=0), "its header cannot be read"),
        (lambda c: resealed(c, tokens=1e3), "its header cannot be read"),
        (lambda c: resealed(c, dtype="float32"), "its header cannot be read"),
        (lambda c: resealed(c, vocabulary_size=20), "its ids exceed its own vocabulary"),
        (lambda c: resealed(c, tokens=1 << 40), "is truncated"),
        (lambda c: resealed(c, surprise=1), "its header cannot be read"),
    ],
)
def test_a_damaged_file_is_told_by_name(small: Path, tmp_path: Path, change, words: str) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(change(small.read_bytes()))
    with pytest.raises(PlanError, match=words) as error:
        read_tokens(str(path))
    assert "damaged" in str(error.value.where)
    assert error.value.fix


def test_a_foreign_file_is_told() -> None:
    with pytest.raises(PlanError, match="is not a token file"):
        open_token_file(Path(__file__), "")


def error_of(path: Path) -> PlanError | None:
    try:
        read_tokens(str(path))
    except PlanError as error:
        return error
    return None


def test_mutated_files_load_or_give_one_error(small: Path, tmp_path: Path) -> None:
    """Bytes of the header and of the sections are changed, cut out and put in: nothing but PlanError ever comes."""
    draw, content = random.Random(0), small.read_bytes()
    places = [*range(300), *range(4096, len(content))]
    num_loaded = 0
    for number in range(400):
        path = tmp_path / f"{number}"
        mutated = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            at = draw.choice(places)
            kind = draw.random()
            if kind < 0.8:
                mutated[at : at + 1] = draw.randbytes(1)
            elif kind < 0.9:
                del mutated[at : at + draw.randint(1, 64)]
            else:
                mutated[at:at] = draw.randbytes(draw.randint(1, 64))
        path.write_bytes(mutated)
        if not is_token_file(path):
            continue
        error = error_of(path)
        if error is not None:
            assert str(number) in error.what
            continue
        tokens = read_tokens(str(path))
        num_loaded += 1
        assert tokens.ends[-1] == len(tokens.ids)
        if mutated != content and mutated[4096:4117] != content[4096:4117]:
            with pytest.raises(PlanError, match="the checksum of its ids does not match"):
                check_content(path)
    assert 20 < num_loaded < 380


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old")

    def pieces():
        yield Piece(np.array([1]), np.array([1], np.uint8), 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TokenWriter(path, Tokenization("", 10)) as writer:
        writer.add(pieces())
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.parametrize("name", ["no/such/folder/tokens", "", "x" * 300])
def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match="cannot write"), TokenWriter(tmp_path / name, Tokenization("", 10)):
        pass


def test_a_header_says_how_long_its_file_is(small: Path) -> None:
    header = Header.model_validate_json(small.read_bytes()[24:].partition(b"\0")[0])
    assert header.num_bytes == small.stat().st_size
    assert header.bytes == 19
