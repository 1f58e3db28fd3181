"""Small tokenizers with chat templates, made on the spot, and templates of the kinds that models have.

Each template is our own text; its comment names what it does that a wrong rule for labels gets wrong.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.data.instruction.conversation import Conversation
from runtime.data.instruction.supervised import Rule, Sample, Turns

TEXT = [
    "the cat sat on the mat",
    "hello there! how are you?\n\nI am well.\n",
    "yes, no, the weather in Rome is sunny. 2 + 2 = 4",
    '{"name": "get_weather", "arguments": {"city": "Rome"}}',
    "user\nassistant\nsystem\n\n",
] * 4
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = ("qwen", "gpt2", "prefix")

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"

TEMPLATES = {
    # contexts and answers are kept: several turns are one sample; the end token is followed by a newline
    "chatml": _TURNS + _PROMPT,
    # thinking is added to the last answer alone: contexts are kept, earlier answers change
    "thinks": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _PROMPT,
    # the end token, a newline, and eos behind the whole conversation
    "eos_behind": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    # eos directly behind the marker
    "eos_directly": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% if m.role == 'assistant' %}"
    "<|end|>{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # no end token: the next role is the end, which the generation config lists
    "next_role": "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n"
    "{% endif %}{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    # no marker at all: eos is the end
    "words": "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}",
    # generation begins with another text than the template writes: refused, or --border common
    "prefills": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # channels: the answer has special tokens of its own, and the last answer ends otherwise than earlier ones
    "channels": "<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>{% for m in messages %}<|start|>"
    "{{ m.role }}{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}<|channel|>analysis<|message|>"
    "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # the system's text moves into the last message of the user, so contexts change
    "moves_system": "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<|user|>"
    "{% if loop.last or loop.index == messages | length - 1 - (1 if s else 0) %}{{ s }}\n\n{% endif %}{{ m.content }}"
    "{% else %}<|assistant|>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # drops the system's message
    "drops_system": "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + _PROMPT,
    # refuses a system message
    "raises": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT,
    # a prompt that ends in a newline before an answer that begins with one: the border would merge
    "newline_first": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ '\n' }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT,
    # cuts texts
    "cuts": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:20] }}<|im_end|>\n{% endfor %}" + _PROMPT,
}
# a tool call whose texts stand between special tokens, and which no end token of other answers follows
QUOTES = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for k, v in "
    "c.function.arguments.items() %}{{ k }}={% if v is string %}<|quote|>{{ v }}<|quote|>{% else %}{{ v }}{% endif %},"
    "{% endfor %})<|call|>{% endfor %}{% if not m.tool_calls %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKERS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>",
    "[gMASK]", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|begin|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<|quote|>", "<|call|>",
]  # fmt: skip


def chat_directory(
    path: Path, template: str | None, split: str = "qwen", ends: list[str] | None = None, size: int = 400
) -> Path:
    """A directory with a tokenizer, a template (of ``TEMPLATES``, or a text) and a generation config."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre, byte_level = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel
    if split == "qwen":
        cut = pre.Split(tokenizers.Regex(QWEN_SPLIT), "isolated")
        made.pre_tokenizer = pre.Sequence([cut, byte_level(add_prefix_space=False, use_regex=False)])
    else:
        made.pre_tokenizer = byte_level(add_prefix_space=split == "prefix")
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=MARKERS, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<|begin|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = None if template is None else TEMPLATES.get(template, template)
    fast.save_pretrained(path)
    if ends is not None:
        ids = [fast.convert_tokens_to_ids(token) for token in ends]
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


def talk(*messages: str | dict[str, Any], system: str | None = None) -> list[dict[str, Any]]:
    """A conversation: texts of user and assistant in turn."""
    found: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for number, given in enumerate(messages):
        role = "assistant" if number % 2 else "user"
        found.append({"role": role, **(given if isinstance(given, dict) else {"content": given})})
    return found


def samples_of(talk: Conversation, rule: Rule) -> list[Sample]:
    """One sample for all trained turns, or one each. Raises RowError."""
    row = Turns(talk, rule)
    row.write()
    return row.samples()
