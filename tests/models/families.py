"""Small models of many families for the numeric tests: a few layers, odd vocabularies, float64, weights that matter.

Every parameter is given noise, also norms and biases: one that is added twice, or summed too seldom, then shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 12
IGNORED = -100


@dataclass
class Entry:
    """``inputs``: name -> (shape of one sequence, dtype, upper bound of integers or None)."""

    model: nn.Module
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]]
    labels: tuple[str, ...] = ()
    ones: tuple[str, ...] = field(default=())

    def batch(self, num_sequences: int, seed: int) -> dict[str, Tensor]:
        """A global batch. The fraction of ignored labels differs from sequence to sequence; one is ignored wholly."""
        generator = torch.Generator().manual_seed(seed)
        made = {name: self._random(name, num_sequences, generator) for name in self.inputs}
        for name in self.labels:
            if made[name].ndim > 1:
                kept = torch.linspace(0.0, 1.0, num_sequences)[torch.randperm(num_sequences, generator=generator)]
                ignored = torch.rand(made[name].shape, generator=generator) >= kept.unsqueeze(1)
                made[name] = made[name].masked_fill(ignored, IGNORED)
        return made

    def loss(self, output: Any) -> Tensor:
        """The loss among what the model returns: by its name, or the second of a tuple."""
        if isinstance(output, Tensor):
            return output
        if hasattr(output, "loss"):
            return output.loss
        return output["loss"] if isinstance(output, dict) else output[1]

    def _random(self, name: str, size: int, generator: torch.Generator) -> Tensor:
        shape, dtype, high = self.inputs[name]
        if name in self.ones:
            return torch.ones(size, *shape, dtype=dtype)
        if high is not None:
            return torch.randint(high, (size, *shape), generator=generator).to(dtype)
        return torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype)


def tokens(high: int, *extra: str, labels: str = "labels", length: int = LENGTH) -> dict[str, Any]:
    """input_ids and labels, and masks of ones by the names in ``extra``."""
    inputs = {name: ((length,), torch.int64, high) for name in ("input_ids", labels)}
    return inputs | {name: ((length,), torch.int64, 2) for name in extra}


def build(name: str) -> Entry:
    """The entry of that name, the same in every process; dropout is off unless the name says otherwise."""
    from tests.models import (
        adapted,
        counted,
        dropping,
        fragile,
        held_weights,
        own,
        own_functions,
        patches,
        preferences,
        signals,
        uneven,
        untrained,
        windowed,
    )

    torch.manual_seed(11)
    models = FAMILIES | own.MODELS | own_functions.FUNCTIONS | counted.MODELS
    models |= (
        signals.SIGNALS
        | held_weights.HELD_WEIGHTS
        | dropping.MODELS
        | untrained.MODELS
        | uneven.MODELS
        | preferences.MODELS
        | patches.MODELS
        | {"fragile": fragile.fragile}
        | adapted.ADAPTED
        | windowed.WINDOWED
    )
    entry = models[name]()
    with torch.no_grad():
        for parameter in entry.model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.06))
    entry.model.double().eval()
    return entry


def hugging_face(
    kind: str, vocabulary: int = 97, inputs: dict[str, Any] | None = None, *, config_stem: str = "", **sizes: Any
) -> Entry:
    """``kind``: the stem of config and model class, as in "GPT2:LMHeadModel"."""
    import transformers

    transformers.logging.set_verbosity_error()
    stem, head = kind.split(":")
    config = getattr(transformers, f"{config_stem or stem}Config")(
        vocab_size=vocabulary, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes
    )
    model = getattr(transformers, stem + head)(config)
    return Entry(model, inputs or tokens(vocabulary), ("labels",))


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA = SIZES | {"intermediate_size": 88, "num_key_value_heads": 2, "attention_dropout": 0.0}
BERT = SIZES | {"intermediate_size": 64}
OLD = {"n_embd": 32, "n_layer": 4, "n_head": 4}


def gpt2(**options: Any) -> Entry:
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return hugging_face("GPT2:LMHeadModel", **(OLD | off | {"n_positions": 16} | options))


def llama(**options: Any) -> Entry:
    return hugging_face("Llama:ForCausalLM", **(LLAMA | options))


def gemma(kind: str, **options: Any) -> Entry:
    return hugging_face(kind, 101, **(LLAMA | {"head_dim": 8, "sliding_window": 5} | options))


def falcon(**options: Any) -> Entry:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return hugging_face(
        "Falcon:ForCausalLM", 99, **(sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | options)
    )


def t5(**options: Any) -> Entry:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    return hugging_face(
        "T5:ForConditionalGeneration", 103, **(sizes | {"decoder_start_token_id": 2, "dropout_rate": 0.0} | options)
    )


def vit() -> Entry:
    import transformers

    config = transformers.ViTConfig(**BERT_SIZES, image_size=8, patch_size=4, num_labels=5)
    images = {"pixel_values": ((3, 8, 8), torch.float64, None), "labels": ((), torch.int64, 5)}
    return Entry(transformers.ViTForImageClassification(config), images)


BERT_SIZES = {k: v for k, v in BERT.items() if k != "max_position_embeddings"}


def _mixed(labels: int = 97) -> dict[str, Any]:
    return tokens(labels, "attention_mask")


FAMILIES: dict[str, Callable[[], Entry]] = {
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False, n_layer=5),
    "gpt2-dropout": lambda: gpt2(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1),
    "gpt2-8-layers": lambda: gpt2(n_layer=8),
    "gpt2-257": lambda: gpt2(vocabulary=257),
    "llama": llama,
    "llama-8-layers": lambda: llama(num_hidden_layers=8),
    "llama-tied": lambda: llama(tie_word_embeddings=True, vocabulary=131),
    "llama-one-key-head": lambda: llama(num_key_value_heads=1),
    "llama-masked": lambda: llama(inputs=_mixed()),
    "bert": lambda: hugging_face("Bert:ForMaskedLM", inputs=_mixed(), **BERT),
    "bert-classes": lambda: _classes("Bert:ForSequenceClassification"),
    "roberta": lambda: hugging_face("Roberta:ForMaskedLM", inputs=_mixed(), **BERT),
    "qwen2": lambda: hugging_face("Qwen2:ForCausalLM", **LLAMA),
    "qwen3": lambda: hugging_face("Qwen3:ForCausalLM", **LLAMA, head_dim=8),
    "diffllama": lambda: hugging_face("DiffLlama:ForCausalLM", **LLAMA),  # head i is paired with head i + heads/2
    "gemma2": lambda: gemma("Gemma2:ForCausalLM"),
    "gemma3": lambda: gemma("Gemma3:ForCausalLM", config_stem="Gemma3Text"),
    "phi3": lambda: hugging_face("Phi3:ForCausalLM", **LLAMA),
    "mistral": lambda: hugging_face("Mistral:ForCausalLM", **LLAMA, sliding_window=5),
    "gpt_neox": lambda: hugging_face("GPTNeoX:ForCausalLM", **SIZES, intermediate_size=64),
    "gpt_neox-sequential": lambda: hugging_face(
        "GPTNeoX:ForCausalLM", **SIZES, intermediate_size=64, use_parallel_residual=False
    ),
    "falcon-7b": lambda: falcon(),
    "falcon-new": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "gptj": lambda: hugging_face("GPTJ:ForCausalLM", **OLD, n_positions=16, rotary_dim=4),
    "bloom": lambda: hugging_face("Bloom:ForCausalLM", hidden_size=32, n_layer=4, n_head=4),
    "opt": lambda: hugging_face("OPT:ForCausalLM", **SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "t5": t5,
    "t5-gated": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "vit": vit,
    "mixtral": lambda: hugging_face("Mixtral:ForCausalLM", **(LLAMA | {"num_hidden_layers": 2}), num_local_experts=4),
    "mixtral-balanced": lambda: hugging_face(
        "Mixtral:ForCausalLM",
        **(LLAMA | {"num_hidden_layers": 2}),
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
}


def _classes(kind: str) -> Entry:
    inputs = {"input_ids": ((LENGTH,), torch.int64, 97), "labels": ((), torch.int64, 3)}
    entry = hugging_face(kind, inputs=inputs, num_labels=3, **BERT)
    return Entry(entry.model, inputs)
