"""Masked words: whole, as many as asked for, and labels that give the text back; pairs in their order or not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.objectives.masked import MaskedWords, RandomIds, choose_words, hide, masked
from runtime.data.objectives.samples import NOTHING
from runtime.data.reading import read_tokens
from runtime.data.tokens import SENTENCE, WORD, Tokenization
from tests.tools.examples import examples
from tests.tools.texts import SPECIAL, STORY, tokens_of

TEXT = [STORY, "Snow fell. The road was gone by noon. We stayed inside and read.", "One. Two. Three. Four."]
ROLES = {"tokens", "labels", "attention_mask", "segments", "positions", "sentence_order"}
ONLY_SPECIAL = Tokenization("few", 4, {"class": 0, "separator": 1, "mask": 2, "padding": 3})
CLASS, SEPARATOR, MASK = (SPECIAL[name] for name in ("class", "separator", "mask"))


def samples(paired=True, length=64, seed=1, text=TEXT, **more):
    return MaskedWords(tokens_of(text), length, paired, seed, **more)


def restored(sample):
    return np.where(sample["labels"] != NOTHING, sample["labels"], sample["tokens"])


def runs(sample):
    """The text of each run of a sample, with its labels put back."""
    ids, mask, segments = restored(sample), sample["attention_mask"], sample["segments"]
    parts = [ids[(segments == n) & (mask == 1)] for n in range(int(segments.max()) + 1)]
    return [bytes(part[(part != CLASS) & (part != SEPARATOR)].tolist()).decode() for part in parts]


def laid_out(text, length):
    ids = [CLASS, *(i for part in text for i in (*part.encode(), SEPARATOR))]
    return ids + [SPECIAL["padding"]] * (length - len(ids))


CASES = st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.integers(8, 100), st.booleans())


@examples(80)
@given(CASES)
def test_labels_restore_the_text_and_no_special_token_is_masked(case):
    seed, epoch, length, paired = case
    made = samples(paired, length, seed)
    whole = "\0".join(TEXT)
    for index in range(made.num_samples):
        sample = made.sample(index, epoch)
        text = runs(sample)
        assert all(part and part in whole for part in text)
        special = np.isin(restored(sample), [CLASS, SEPARATOR]) | (sample["attention_mask"] == 0)
        assert (sample["labels"][special] == NOTHING).all()
        assert restored(sample).tolist() == laid_out(text, length)
        sizes = [1 + len(text[0]) + 1, *(len(part) + 1 for part in text[1:])]  # separators belong to what they close
        assert sample["attention_mask"].tolist() == [1] * sum(sizes) + [0] * (length - sum(sizes))
        assert sample["segments"].tolist() == [0] * sizes[0] + [1] * sum(sizes[1:]) + [0] * (length - sum(sizes))
        changed = sample["tokens"] != restored(sample)
        assert (sample["labels"][changed] != NOTHING).all()
        assert not np.isin(sample["tokens"][changed & (sample["tokens"] != MASK)], list(SPECIAL.values())).any()


@examples(60)
@given(CASES)
def test_words_are_chosen_whole_and_meet_one_fate(case):
    seed, epoch, length, _ = case
    made = samples(False, length, seed)
    for index in range(made.num_samples):
        begin, stop = made.windows[index].tolist()
        sample = made.sample(index, epoch)
        place = slice(1, 1 + stop - begin)
        chosen, hidden = sample["labels"][place] != NOTHING, sample["tokens"][place] == MASK
        begins = np.flatnonzero(made.tokens.marks[begin:stop] & WORD)
        for word in np.split(np.arange(stop - begin), begins[begins > 0]):
            assert chosen[word].all() or not chosen[word].any()
            assert hidden[word].all() or not hidden[word].any()


def test_a_pair_is_two_runs_in_a_row_and_its_label_says_which_came_first():
    made, whole = samples(), "\0".join(TEXT)
    labels = []
    for epoch in range(40):
        for index in range(made.num_samples):
            sample = made.sample(index, epoch)
            first, second = runs(sample)
            label = int(sample["sentence_order"])
            assert (second + first if label else first + second) in whole
            assert sample["sentence_order"].shape == ()
            labels.append(label)
    assert 0.4 < np.mean(labels) < 0.6


def test_both_runs_of_a_pair_begin_with_a_sentence_where_all_fits():
    made = samples(length=128)
    marks, whole = made.tokens.marks, bytes(made.tokens.ids.tolist()).decode()
    for epoch in range(10):
        for index in range(made.num_samples):
            assert all(marks[whole.index(part)] & SENTENCE for part in runs(made.sample(index, epoch)))


def test_every_epoch_masks_anew_and_a_sample_depends_on_seed_epoch_and_index_alone():
    one, again = samples().sample(1, 5), samples().sample(1, 5)
    assert all(np.array_equal(one[role], again[role]) for role in one)
    assert one.keys() == ROLES
    assert not np.array_equal(one["tokens"], samples().sample(1, 6)["tokens"])
    assert not np.array_equal(one["tokens"], samples(seed=2).sample(1, 5)["tokens"])


def test_without_segments_a_sample_is_one_run():
    sample = samples(False).sample(0, 0)
    assert "sentence_order" not in sample
    assert not sample["segments"].any()
    assert runs(sample) == [STORY[:62]]
    assert (restored(sample) == SEPARATOR).sum() == 1


@pytest.mark.parametrize(("length", "share"), [(64, 0.3), (64, 0.5), (200, 0.15), (400, 0.05), (400, 0.15)])
def test_the_share_of_chosen_tokens_is_met_on_average(length, share):
    made = samples(False, length, share=share, text=[STORY * 8])
    chosen, total = 0, 0
    for epoch in range(600):
        sample = made.sample(epoch % max(1, made.num_samples - 1), epoch)
        chosen += int((sample["labels"] != NOTHING).sum())
        total += int(sample["attention_mask"].sum()) - 2
    assert share * 0.95 < chosen / total < share * 1.05


def test_long_words_get_their_turn_in_short_samples():
    made = samples(False, 24, text=["a bb incomprehensibly c d"])
    labels = [made.sample(0, epoch)["labels"] for epoch in range(200)]
    assert 0 < sum(int((x != NOTHING).sum()) >= len("incomprehensibly") for x in labels) < 100


def test_an_ngram_of_n_words_is_drawn_with_probability_1_over_n():
    draw = np.random.default_rng(0)
    chosen = [choose_words(np.arange(2001), [0], 1 / 2000, 3, draw) for _ in range(6000)]  # one token to choose
    assert all(np.ptp(np.flatnonzero(x)) == x.sum() - 1 for x in chosen)  # in a row
    seen = np.bincount([int(x.sum()) for x in chosen], minlength=4)[1:] / 6000
    drawn = np.array([6, 3, 2]) / 11
    taken = drawn / [1, 2, 3]  # the part that fits; where it is left out, one word is chosen all the same
    assert np.allclose(seen, taken + np.array([1 - taken.sum(), 0, 0]), atol=0.015)


def test_no_ngram_crosses_from_one_run_into_the_next():
    draw = np.random.default_rng(0)
    chosen = {tuple(np.flatnonzero(choose_words(np.arange(5), [0, 2], 0.25, 2, draw))) for _ in range(1000)}
    assert chosen == {(0,), (1,), (2,), (3,), (0, 1), (2, 3)}


def test_chosen_words_are_masked_replaced_or_kept_8_1_1():
    draw, size = np.random.default_rng(0), 30_000
    bounds, chosen = np.arange(0, 2 * size + 1, 2), np.ones(size, dtype=bool)
    hidden = hide(np.full(2 * size, 300), bounds, chosen, 26, RandomIds(300, [0, 1, 26, 28]), draw)
    words = hidden.reshape(-1, 2)
    masked, kept = (words == 26).all(1), (words == 300).all(1)
    assert abs(masked.mean() - 0.8) < 0.01
    assert abs(kept.mean() - 0.1) < 0.01
    rest = words[~masked & ~kept]
    assert not np.isin(rest, [0, 1, 26, 28, 300]).any()
    assert (rest[:, 0] != rest[:, 1]).mean() > 0.98  # each token its own id


def test_random_ids_are_all_but_the_special_ones():
    drawn = RandomIds(8, [0, 1, 5, 7, 7]).drawn(2000, np.random.default_rng(0))
    assert sorted(set(drawn.tolist())) == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MaskedWords(tokens_of(TEXT, {"end": 0, "mask": 3}), 64, True, 1), "lacks: class, separator, padding"),
        (lambda: MaskedWords(replace(tokens_of(TEXT), tokenization=ONLY_SPECIAL), 64, True, 1), "only special tokens"),
        (lambda: MaskedWords(tokens_of(TEXT), 4, True, 1), "too short for special tokens"),
        (lambda: MaskedWords(tokens_of(["One sentence.", ""]), 64, True, 1), "no document of the data"),
        (lambda: MaskedWords(tokens_of([""]), 64, False, 1), "contains no tokens"),
    ],
)
def test_what_cannot_be_masked_is_one_plan_error(make, said):
    with pytest.raises(PlanError, match=said):
        make()


def test_samples_are_pairs_where_the_model_reads_segments_or_an_order():
    def keys(*roles):
        return (
            masked(tokens_of(TEXT), 64, DataSpec(objective="masked"), 1, dict.fromkeys(["tokens", *roles], (64,)))
            .sample(0, 0)
            .keys()
        )

    assert keys("labels") == keys("attention_mask", "positions") == ROLES - {"sentence_order"}
    assert keys("segments") == keys("sentence_order") == ROLES


def test_share_and_ngram_are_those_of_the_spec():
    data = DataSpec.model_validate({"objective": "masked", "mask": {"share": 0.5, "ngram": 1}})
    made = masked(tokens_of(TEXT), 64, data, 1, {"tokens": (64,)})
    assert isinstance(made, MaskedWords)
    assert (made.share, made.ngram) == (0.5, 1)


def test_the_pieces_of_a_word_are_masked_together_by_a_tokenizer_s_own_special_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, "un", "##believ", "##able", "it", "was", "is", "."]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("it was unbelievable . it is unbelievable . was it unbelievable .")
    tokens = read_tokens(str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json"))
    samples, fates = MaskedWords(tokens, 24, True, 1), set()
    for epoch in range(200):
        sample = samples.sample(0, epoch)
        first = np.flatnonzero(restored(sample) == numbers["un"])
        fates |= {tuple((sample["labels"][i : i + 3] != NOTHING).tolist()) for i in first}
        around = sample["tokens"][np.isin(sample["tokens"], [numbers[name] for name in ("[PAD]", "[CLS]", "[SEP]")])]
        assert sorted(around.tolist()) == [0, 0, 0, 2, 3, 3]
    assert fates == {(True,) * 3, (False,) * 3}
