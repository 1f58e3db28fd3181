"""The options of ``meshwright prepare`` for instruction data: rows of conversations, or of prompts and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from passes.errors import PlanError
from planner.files.text import shorten

Text = str | None
Refused = Literal["refuse", "drop"]
_OF_TEXTS = {"text", "begin_token", "length", "split"}


def _named(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, help=help)


def _told(help: str) -> Any:
    return typer.Option(help=help)


@dataclass(frozen=True)
class Instruction:
    """``chat``: the field of messages; or ``prompt`` and ``answer``, or ``text``: those of texts; or ``chosen`` and
    ``rejected``: those of two answers."""

    chat: Annotated[Text, _named("FIELD", "Rows are conversations: this field is a list of role and content.")] = None
    prompt: Annotated[Text, _named("FIELD", "With --answer: the field of a prompt, which is no label.")] = None
    answer: Annotated[Text, _named("FIELD", "With --prompt: the field of an answer; its tokens are labels.")] = None
    chosen: Annotated[
        Text,
        _named("FIELD", "Rows are pairs: the field of the better answer (a text with --prompt, or messages)."),
    ] = None
    rejected: Annotated[Text, _named("FIELD", "With --chosen: the field of the worse answer.")] = None
    text: Annotated[Text, _named("FIELD", "Rows are documents: this field of JSON lines, parquet or `datasets`.")] = (
        None
    )
    format: Annotated[
        Literal["openai", "sharegpt", "alpaca"] | None,
        _told("Format of conversations; default: detected row by row, and reported."),
    ] = None
    chat_template: Annotated[Text, _named("FILE|NAME", "A chat template in place of the tokenizer's default.")] = None
    template_args: Annotated[
        list[str] | None, _named("NAME=VALUE", "An argument of the template: enable_thinking=false.")
    ] = None
    train_on: Annotated[Literal["all", "last"], _told("Answers that are labels: all, or the last of a row.")] = "all"
    border: Annotated[
        Literal["exact", "common"],
        _told(
            "exact: refuse rows in which the template writes another text before an answer than generation sees; "
            "common: there, labels begin where the two differ."
        ),
    ] = "exact"
    ignore_field: Annotated[
        list[str] | None, _named("NAME", "A field that the template may drop: reasoning_content, tools.")
    ] = None
    unlabelled: Annotated[Refused, _told("Rows without an answer to train on.")] = "refuse"
    bad_rows: Annotated[Refused, _told("Rows that cannot be used; the dropped ones are counted.")] = "refuse"
    date: Annotated[Text, _named("YYYY-MM-DD", "The day that templates see; default: today, kept in the file.")] = None
    begin_token: Annotated[
        Literal["none", "auto"], _told("auto: documents begin with the token that the tokenizer puts there.")
    ] = "none"
    split: Annotated[Text, _named("NAME", "The split of a directory of `datasets`.")] = None
    length: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Count what is longer than a sequence of N tokens.")
    ] = None
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Print the first N samples with ⟦labels⟧ marked.")] = 0
    json: Annotated[bool, typer.Option("--json", help="With --show: print nothing but a JSON line a sample.")] = False

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
