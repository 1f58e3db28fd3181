"""The options of ``meshwright prepare`` for instruction data: rows of conversations, or of prompts and answers."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from passes.errors import PlanError
from planner.files.text import shorten
from runtime.options import flag, option

Text = str | None
Refused = Literal["refuse", "drop"]
_OF_TEXTS = {"text", "begin_token", "length", "split"}


@dataclass(frozen=True)
class Instruction:
    """The options. ``chat`` names the field of a row's messages; ``prompt``, ``answer`` and ``text`` fields of texts;
    ``chosen`` and ``rejected`` the fields of two answers.
    """

    chat: Text = option("Rows are conversations: field with a list of messages (role and content).", "FIELD")
    prompt: Text = option("With --answer: field of the prompt; its tokens are not labels.", "FIELD")
    answer: Text = option("With --prompt: field of the answer; its tokens are labels.", "FIELD")
    chosen: Text = option(
        "Rows are preference pairs: field of the better answer (a text with --prompt, else messages).", "FIELD"
    )
    rejected: Text = option("With --chosen: field of the worse answer.", "FIELD")
    text: Text = option("Rows are documents: field of the text, in JSON lines, parquet or `datasets`.", "FIELD")
    format: Literal["openai", "sharegpt", "alpaca"] | None = option(
        "Format of conversations; default: detected in each row, and reported."
    )
    chat_template: Text = option("Chat template instead of the tokenizer's default.", "FILE|NAME")
    template_args: list[str] | None = option(
        "Argument of the chat template, such as enable_thinking=false; may be repeated.", "NAME=VALUE"
    )
    train_on: Literal["all", "last"] = option(
        "Answers of a row that become labels: all, or only the last one.", default="all"
    )
    border: Literal["exact", "common"] = option(
        "If the template renders the text before an answer otherwise than generation does: exact refuses the row, "
        "common begins the labels at the first difference.",
        default="exact",
    )
    ignore_field: list[str] | None = option(
        "Field that the template may drop, such as reasoning_content or tools; may be repeated.", "NAME"
    )
    unlabelled: Refused = option("Refuse or drop rows without an answer to train on.", default="refuse")
    bad_rows: Refused = option("Refuse or drop rows that cannot be used; dropped rows are counted.", default="refuse")
    date: Text = option("Current date for chat templates, stored in the file; default: today.", "YYYY-MM-DD")
    begin_token: Literal["none", "auto"] = option(
        "auto: begin each document with the begin token of the tokenizer.", default="none"
    )
    split: Text = option("Split to read from a directory of `datasets`.", "NAME")
    length: int | None = option("Count the samples or documents that are longer than N tokens.", "N", min=2)
    show: int = option("Print the first N samples, with their labels in ⟦ ⟧.", "N", default=0, min=0)
    json: bool = flag("With --show: print only one JSON line per sample.")

    def makes_samples(self, tokenizer: str | None) -> bool:
        """Return whether rows become samples with labels, not texts. Raises PlanError for conflicting options."""
        if (self.chosen is None) != (self.rejected is None):
            raise PlanError("--chosen and --rejected go together", where="--chosen", fix="name both fields")
        is_pair = self.chosen is not None
        if (self.prompt is None) != (self.answer is None) and not (is_pair and self.answer is None):
            raise PlanError("--prompt and --answer go together", where="--prompt", fix="name both fields")
        is_chat = self.chat is not None or self.format == "alpaca"
        if is_chat + is_pair + (self.answer is not None) + (self.text is not None) > 1:
            what = "--chat, --prompt with --answer, --chosen with --rejected, and --text are four kinds of rows"
            raise PlanError(what, where="--chat", fix="choose one of them")
        if not is_chat and not is_pair and self.prompt is None:
            self._check_texts()
            return False
        if tokenizer is None:
            what = "answers need the model's tokenizer, for its chat template and its end token"
            raise PlanError(what, where="--tokenizer", fix="add --tokenizer DIR, the model's directory")
        if self.json and not self.show:
            raise PlanError("--json applies to the samples of --show", where="--json", fix="add --show N")
        return True

    def _check_texts(self) -> None:
        """Raise PlanError for an option that has no effect on texts."""
        of_texts = _OF_TEXTS if self.text is not None else _OF_TEXTS - {"split"}
        changed = [name for name, value in vars(self).items() if value and value != getattr(Instruction, name)]
        if wrong := [f"--{name.replace('_', '-')}" for name in changed if name not in of_texts]:
            what = f"{', '.join(wrong)} without --chat, or --prompt with --answer"
            raise PlanError(what, where=wrong[0], fix="name the field of the conversations with --chat")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the chat template: JSON values, otherwise strings. Raises PlanError for another form."""
        arguments: dict[str, Any] = {}
        for text in self.template_args or ():
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                what = f"--template-args {shorten(text, 60)} is not NAME=VALUE"
                raise PlanError(what, where="--template-args", fix="write enable_thinking=false")
            try:
                arguments[name] = json.loads(value)
            except ValueError:
                arguments[name] = value
        return arguments
