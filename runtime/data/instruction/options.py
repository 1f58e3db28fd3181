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
    """``chat``: the field of messages; or ``prompt`` and ``answer``, or ``text``: those of texts; or ``chosen`` and
    ``rejected``: those of two answers."""

    chat: Text = option("Rows are conversations: this field is a list of role and content.", "FIELD")
    prompt: Text = option("With --answer: the field of a prompt, which is no label.", "FIELD")
    answer: Text = option("With --prompt: the field of an answer; its tokens are labels.", "FIELD")
    chosen: Text = option(
        "Rows are pairs: the field of the better answer (a text with --prompt, or messages).", "FIELD"
    )
    rejected: Text = option("With --chosen: the field of the worse answer.", "FIELD")
    text: Text = option("Rows are documents: this field of JSON lines, parquet or `datasets`.", "FIELD")
    format: Literal["openai", "sharegpt", "alpaca"] | None = option(
        "Format of conversations; default: detected row by row, and reported."
    )
    chat_template: Text = option("A chat template in place of the tokenizer's default.", "FILE|NAME")
    template_args: list[str] | None = option("An argument of the template: enable_thinking=false.", "NAME=VALUE")
    train_on: Literal["all", "last"] = option("Answers that are labels: all, or the last of a row.", default="all")
    border: Literal["exact", "common"] = option(
        "exact: refuse rows in which the template writes another text before an answer than generation sees; "
        "common: there, labels begin where the two differ.",
        default="exact",
    )
    ignore_field: list[str] | None = option("A field that the template may drop: reasoning_content, tools.", "NAME")
    unlabelled: Refused = option("Rows without an answer to train on.", default="refuse")
    bad_rows: Refused = option("Rows that cannot be used; the dropped ones are counted.", default="refuse")
    date: Text = option("The day that templates see; default: today, kept in the file.", "YYYY-MM-DD")
    begin_token: Literal["none", "auto"] = option(
        "auto: documents begin with the token that the tokenizer puts there.", default="none"
    )
    split: Text = option("The split of a directory of `datasets`.", "NAME")
    length: int | None = option("Count what is longer than a sequence of N tokens.", "N", min=2)
    show: int = option("Print the first N samples with ⟦labels⟧ marked.", "N", default=0, min=0)
    json: bool = flag("With --show: print nothing but a JSON line a sample.")

    def makes_samples(self, tokenizer: str | None) -> bool:
        """Whether rows become samples with labels, not texts. Raises PlanError for options that do not go together."""
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
            what = "answers need the model's tokenizer, which ends them as generation does"
            raise PlanError(what, where="--tokenizer", fix="add --tokenizer DIR, the model's directory")
        if self.json and not self.show:
            raise PlanError("--json is for the samples of --show", where="--json", fix="add --show N")
        return True

    def _check_texts(self) -> None:
        """Raise PlanError for an option that has no effect on texts."""
        of_texts = _OF_TEXTS if self.text is not None else _OF_TEXTS - {"split"}
        given = [name for name, value in vars(self).items() if value and value != getattr(Instruction, name)]
        if wrong := [f"--{name.replace('_', '-')}" for name in given if name not in of_texts]:
            what = f"{', '.join(wrong)} without --chat, or --prompt with --answer"
            raise PlanError(what, where=wrong[0], fix="name the field of the conversations with --chat")

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the template: values as JSON, else as text. Raises PlanError."""
        found: dict[str, Any] = {}
        for text in self.template_args or ():
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                what = f"--template-args {shorten(text, 60)} is not NAME=VALUE"
                raise PlanError(what, where="--template-args", fix="write enable_thinking=false")
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found
