"""Makes the directory `examples/chat`: a tiny Llama's config, its tokenizer with a chat template, and conversations.

    python examples/chat.py            writes the files beside this one

The guide's page "Instruction tuning" trains on them. A real model's directory has the same files, and weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent / "chat"
TEMPLATE = """\
{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content | trim + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
MARKERS = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Sums, and then whether the sum is even."""
    found = []
    for a in range(6):
        for b in range(5):
            turns = [
                f"What is {NUMBERS[a]} plus {NUMBERS[b]}?",
                f"It is {NUMBERS[a + b]}.",
                "Is that even?",
                "No." if (a + b) % 2 else "Yes.",
            ]
            roles = ("user", "assistant", "user", "assistant")
            found.append({"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]})
    return found


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of these texts, with the markers of the template as special tokens."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=MARKERS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


if __name__ == "__main__":
    talks = conversations()
    made = tokenizer([message["content"] for talk in talks for message in talk["messages"]])
    made.save_pretrained(HERE)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(made),
        max_position_embeddings=128,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=made.eos_token_id,
        use_cache=False,
    )
    config.save_pretrained(HERE)
    (HERE / "generation_config.json").write_text(json.dumps({"eos_token_id": made.eos_token_id}) + "\n")
    (HERE / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
