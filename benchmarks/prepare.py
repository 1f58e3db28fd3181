"""CPU seconds of `meshwright prepare --chat` beside those that its tokenizer needs for the same texts.

    python benchmarks/prepare.py [--rows 20000]

Texts are words of the standard library's sources, by a byte-level BPE of 8,192 tokens that is trained on them. Both run
in one process on one thread: rendering, checks and files of `prepare` come on top of the tokenizer's own time.
"""

import json
import os
import random
import sysconfig
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import prepare_samples

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# messages of a row, words of each, how many times fewer rows; the first pays for imports and the template
KINDS = {"imports": (2, 8, 100), "short": (2, 8, 1), "turns": (6, 40, 12), "long": (2, 600, 60)}


def sources() -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]


def save_tokenizer(texts: list[str], directory: Path) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8192, special_tokens=special, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return fast


def rows_of(words: list[str], num_rows: int, num_messages: int, num_words: int) -> list[list[dict[str, str]]]:
    drawn = random.Random(0)
    return [
        [
            {"role": ("user", "assistant")[n % 2], "content": " ".join(drawn.choices(words, k=num_words))}
            for n in range(num_messages)
        ]
        for _ in range(num_rows)
    ]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    num_rows, texts = parser.parse_args().rows, sources()
    words = sorted({word for text in texts for word in text.split() if word.isalnum()})
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        tokenizer = save_tokenizer(texts, out / "model")
        print(f"{'rows':7} {'tokens':>11} {'tokenizer':>10} {'prepare':>9} {'of its speed':>13}")
        for name, (num_messages, num_words, fewer) in KINDS.items():
            rows = rows_of(words, num_rows // fewer, num_messages, num_words)
            whole = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
            (out / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
            begin = time.process_time()
            for text in whole:
                tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            own, begin = time.process_time() - begin, time.process_time()
            asked = Instruction(chat="messages")
            header, _ = prepare_samples([out / "chat.jsonl"], out / "sft", str(out / "model"), asked)
            took = time.process_time() - begin
            print(f"{name:7} {header.tokens:11,} {own:8.2f} s {took:7.2f} s {own / took:13.2f}", flush=True)


if __name__ == "__main__":
    main()
