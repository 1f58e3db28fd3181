"""Models wrapped by the package peft: its methods, each on a small base, with adapters that matter.

``families.build`` adds noise to every parameter: a LoRA's B, which starts at zero, then shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models import families
from tests.models.families import Entry

Q, V, DOWN, HEAD, EMBEDDING = "q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"


def adapted(
    kind: str,
    base: Callable[[], Entry] = families.llama,
    also: Callable[[Any], None] = lambda model: None,
    task_type: str = "CAUSAL_LM",
    **options: Any,
) -> Callable[[], Entry]:
    """``kind``: the stem of peft's config class. ``also``: a change of the wrapped model."""

    def make() -> Entry:
        import peft

        config = getattr(peft, f"{kind}Config")(task_type=task_type, **options)
        entry = base()
        model = peft.get_peft_model(entry.model, config)
        also(model)
        return Entry(model, entry.inputs, entry.labels, entry.ones)

    return make


def lora(*targets: str, **options: Any) -> Callable[[], Entry]:
    return adapted("Lora", target_modules=list(targets), **({"r": 4, "lora_alpha": 8} | options))


def mixtral() -> Entry:
    """As many layers as the other bases have."""
    return families.hugging_face("Mixtral:ForCausalLM", **families.LLAMA, num_local_experts=4)


def second(model: Any) -> None:
    """A second LoRA of other targets and rank; only the first is trained and runs."""
    import peft

    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[V, DOWN]))


def both(model: Any) -> None:
    """Two adapters that run and train together."""
    second(model)
    model.base_model.set_adapter(["default", "second"])


def merged(model: Any) -> None:
    model.merge_adapter()


ADAPTED: dict[str, Callable[[], Entry]] = {
    "lora": lora(Q, V),
    "lora-all-linear": adapted("Lora", r=4, target_modules="all-linear", bias="all"),
    "lora-rank-stabilised": lora(Q, DOWN, use_rslora=True),
    "lora-patterns": lora(Q, V, rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={V: 3}),
    "lora-some-layers": lora(Q, V, layers_to_transform=[1, 3]),
    "lora-with-head": lora(Q, modules_to_save=[HEAD]),
    "lora-with-embedding": lora(Q, EMBEDDING),
    "lora-new-tokens": lora(Q, trainable_token_indices=[1, 5, 60]),
    "lora-two": adapted("Lora", r=4, target_modules=[Q, V], also=second),
    "lora-both": adapted("Lora", r=4, target_modules=[Q, V], also=both),
    "dora": lora(Q, "o_proj", DOWN, use_dora=True),
    "ia3": adapted("IA3", target_modules=["k_proj", V, DOWN], feedforward_modules=[DOWN]),
    "prompt": adapted("PromptTuning", num_virtual_tokens=4),
    "prefix": adapted("PrefixTuning", num_virtual_tokens=4),
    "prefix-projection": adapted("PrefixTuning", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=24),
    "p-tuning": adapted("PromptEncoder", num_virtual_tokens=4, encoder_hidden_size=16),
    "adaption-prompt": adapted("AdaptionPrompt", adapter_len=4, adapter_layers=2),
    "vera": adapted("Vera", r=4, target_modules=[Q, "o_proj"]),
    "loha": adapted("LoHa", r=4, target_modules=[Q, DOWN]),
    "lokr": adapted("LoKr", r=4, target_modules=[Q, DOWN]),
    "oft": adapted("OFT", oft_block_size=4, target_modules=[Q, DOWN]),
    "boft": adapted("BOFT", boft_block_size=4, target_modules=[Q]),
    "adalora": adapted("AdaLora", total_step=10, target_modules=[Q, DOWN]),
    "norms": adapted("LNTuning", target_modules=["input_layernorm", "post_attention_layernorm"]),
    "fourier": adapted("FourierFT", n_frequency=8, target_modules=[Q]),
    "trainable-tokens": adapted("TrainableTokens", token_indices=[1, 2, 60], target_modules=[EMBEDDING]),
    "hra": adapted("HRA", r=4, target_modules=[Q]),
    "miss": adapted("Miss", r=4, target_modules=[Q, DOWN]),
    "gpt2-lora": adapted("Lora", families.gpt2, r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "gpt2-dora": adapted("Lora", families.gpt2, r=4, target_modules=["c_fc"], fan_in_fan_out=True, use_dora=True),
    "gpt2-prefix": adapted("PrefixTuning", families.gpt2, num_virtual_tokens=3),
    "t5-lora": adapted("Lora", families.t5, r=4, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM"),
    "t5-ia3": adapted(
        "IA3", families.t5, target_modules=["k", "v", "wo"], feedforward_modules=["wo"], task_type="SEQ_2_SEQ_LM"
    ),
    "mixtral-lora-experts": adapted(
        "Lora",
        mixtral,
        r=4,
        target_modules=[Q],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "bert-lora": adapted("Lora", families.FAMILIES["bert-classes"], r=4, target_modules=["query"], task_type="SEQ_CLS"),
}
