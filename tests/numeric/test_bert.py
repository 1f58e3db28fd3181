"""Either LayerNorm placement of the example BERT (Shoeybi et al. 2019, figure 7): padding, order, and the residual."""

import pytest
import torch

from examples.bert import BERT
from tests.models.own import VOCABULARY


def model_and_batch(*, normalize_first: bool) -> tuple[BERT, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = BERT(normalize_first=normalize_first, vocabulary=VOCABULARY, length=8, width=16, num_layers=2, num_heads=2)
    ids = torch.randint(VOCABULARY, (2, 8))
    mask = torch.arange(8).expand(2, 8) < 6
    labels = torch.where(torch.arange(8) % 3 == 1, ids, -100)
    batch = {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask.long(), "labels": labels}
    return model, batch | {"sentence_order_label": torch.tensor([0, 1])}


@pytest.mark.parametrize("normalize_first", [False, True])
def test_padding_changes_no_word_before_it_and_the_order_counts(normalize_first: bool) -> None:
    model, batch = model_and_batch(normalize_first=normalize_first)
    batch["labels"][:, 6:] = -100
    other = batch | {"input_ids": batch["input_ids"].index_fill(1, torch.tensor([6, 7]), 5)}
    assert torch.equal(model(**batch), model(**other))
    seen = batch | {"attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    assert not torch.equal(model(**batch), model(**seen))
    assert not torch.equal(model(**batch), model(**batch | {"sentence_order_label": torch.tensor([1, 1])}))


def test_the_residual_is_clean_only_where_the_norm_comes_first() -> None:
    for normalize_first in (False, True):
        model, _ = model_and_batch(normalize_first=normalize_first)
        for parameter in model.blocks.parameters():
            parameter.data.zero_()  # sublayers add nothing, and a norm gives zero
        x, seen = torch.randn(2, 8, 16), torch.ones(2, 1, 1, 8, dtype=torch.bool)
        assert torch.equal(model.blocks[0](x, seen), x) == normalize_first
