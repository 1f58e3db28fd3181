"""Small texts as tokens, made by hand: one id a byte, sentences end with a full stop, words with a space."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from runtime.data.tokens import SENTENCE, WORD, Tokenization, Tokens

SPECIAL = {"end": 0, "class": 1, "separator": 28, "mask": 26, "padding": 0}
STORY = "The cat sat down. It slept for an hour. Then it woke up hungry. Nobody had left any fish. So it went out."


def tokens_of(documents: Iterable[str], special: dict[str, int] | None = None) -> Tokens:
    """Each document with the end token behind it."""
    ids, marks, ends, words = [], [], [], []
    for text in documents:
        held = text.encode()
        ids += [*held, SPECIAL["end"]]
        marks += [*_marks(held), 0]
        ends.append(len(ids))
        words.append(len(text.split()))
    arrays = np.array(ids, np.uint16), np.array(ends, np.int64), np.array(marks, np.uint8), np.array(words, np.int64)
    tokenization = Tokenization("bytes", 256, SPECIAL if special is None else special)
    return Tokens(*arrays, tokenization, "a text", "by hand")


def _marks(text: bytes) -> list[int]:
    found, is_word, is_sentence = [], True, True
    for byte in text:
        here = byte != ord(" ")
        found.append(WORD * (here and is_word) | SENTENCE * (here and is_sentence))
        is_sentence = byte == ord(".") or (is_sentence and not here)
        is_word = not here
    return found


def by_hand(*documents: list[int], vocabulary_size: int = 256, **special: int) -> Tokens:
    """Tokens of these documents, each a word."""
    ids = np.array([i for document in documents for i in document], np.int64)
    ends = np.cumsum([len(document) for document in documents])
    words = np.array([len(document) for document in documents])
    how = Tokenization("by hand", vocabulary_size, special)
    return Tokens(ids, ends, np.ones(len(ids), np.uint8), words, how, "by hand", str(hash(tuple(ids.tolist()))))


TEXT = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog, the best of them. Ünïcode!"] * 4


def bpe_file(path: Path, size: int = 300) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path))
    return path


def word_piece_file(path: Path, size: int = 120) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path))
    return path
