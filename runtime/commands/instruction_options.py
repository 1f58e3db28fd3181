"""The options of ``meshwright prepare`` for instruction data: rows of conversations, or of prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from passes.errors import PlanError
from planner.files.text import shorten

if TYPE_CHECKING:
    from runtime.data.instruction.prepare import Asked
    from runtime.data.text.pieces import Part
    from runtime.data.token_file import Header
    from runtime.data.tokens import Tokens

Text = str | None


class RowFormat(StrEnum):
    openai = "openai"
    sharegpt = "sharegpt"
    alpaca = "alpaca"


class TrainOn(StrEnum):
    all = "all"
    last = "last"


class Border(StrEnum):
    exact = "exact"
    common = "common"


class Refused(StrEnum):
    refuse = "refuse"
    drop = "drop"


class BeginToken(StrEnum):
    none = "none"
    auto = "auto"


@dataclass(frozen=True)
class Instruction:
    chat: Annotated[
        Text, typer.Option(metavar="FIELD", help="Rows are conversations: this field is a list of role and content.")
    ] = None
    prompt: Annotated[
        Text, typer.Option(metavar="FIELD", help="With --answer: the field of a prompt, which is no label.")
    ] = None
    answer: Annotated[
        Text, typer.Option(metavar="FIELD", help="With --prompt: the field of an answer; its tokens are labels.")
    ] = None
    text: Annotated[
        Text, typer.Option(metavar="FIELD", help="Rows are documents: this field of JSON lines, parquet or `datasets`.")
    ] = None
    format: Annotated[
        RowFormat | None, typer.Option(help="Format of conversations; default: detected row by row, and reported.")
    ] = None
    chat_template: Annotated[
        Text, typer.Option(metavar="FILE|NAME", help="A chat template in place of the tokenizer's default.")
    ] = None
    template_args: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of the template: enable_thinking=false.")
    ] = None
    train_on: Annotated[TrainOn, typer.Option(help="Answers that are labels: all, or the last of a row.")] = TrainOn.all
    border: Annotated[
        Border,
        typer.Option(
            help="exact: refuse rows in which the template writes another text before an answer than generation "
            "sees; common: there, labels begin where the two differ."
        ),
    ] = Border.exact
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A field that the template may drop: reasoning_content, tools."),
    ] = None
    unlabelled: Annotated[Refused, typer.Option(help="Rows without an answer to train on.")] = Refused.refuse
    bad_rows: Annotated[Refused, typer.Option(help="Rows that cannot be used; the dropped ones are counted.")] = (
        Refused.refuse
    )
    date: Annotated[
        Text, typer.Option(metavar="YYYY-MM-DD", help="The day that templates see; default: today, kept in the file.")
    ] = None
    begin_token: Annotated[
        BeginToken, typer.Option(help="auto: documents begin with the token that the tokenizer puts there.")
    ] = BeginToken.none
    split: Annotated[Text, typer.Option(metavar="NAME", help="The split of a directory of `datasets`.")] = None
    length: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Count what is longer than a sequence of N tokens.")
    ] = None
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Print the first N samples with ⟦labels⟧ marked.")] = 0
    json: Annotated[bool, typer.Option("--json", help="With --show: print nothing but a JSON line a sample.")] = False

    @property
    def begins(self) -> bool:
        return self.begin_token is BeginToken.auto

    def asked(self, tokenizer: str | None) -> Asked | None:
        """The options of samples with labels; None for texts. Raises PlanError for options that do not go together."""
        from runtime.data.instruction.chat_tokenizer import Templating
        from runtime.data.instruction.prepare import Asked

        if (self.prompt is None) != (self.answer is None):
            raise PlanError("--prompt and --answer go together", where="--prompt", fix="name both fields")
        is_chat = self.chat is not None or self.format is RowFormat.alpaca
        if is_chat + (self.prompt is not None) + (self.text is not None) > 1:
            what = "--chat, --prompt with --answer, and --text are three kinds of rows"
            raise PlanError(what, where="--chat", fix="choose one of them")
        if not is_chat and self.prompt is None:
            self._check_texts()
            return None
        if tokenizer is None:
            what = "answers need the model's tokenizer, which ends them as generation does"
            raise PlanError(what, where="--tokenizer", fix="add --tokenizer DIR, the model's directory")
        if self.json and not self.show:
            raise PlanError("--json is for the samples of --show", where="--json", fix="add --show N")
        templating = Templating(self.chat_template, _arguments(self.template_args or []), self.date)
        return Asked(
            tokenizer,
            self.chat,
            self.prompt,
            self.answer,
            None if self.format is None else self.format.value,
            templating,
            self.train_on.value,
            common=self.border is Border.common,
            ignored=tuple(self.ignore_field or ()),
            drop_unlabelled=self.unlabelled is Refused.drop,
            skip_bad=self.bad_rows is Refused.drop,
            split=self.split,
        )

    def _check_texts(self) -> None:
        """Raise PlanError for an option that has no effect on texts."""
        of_texts = {"text", "begin_token", "length", *(["split"] if self.text is not None else [])}
        given = [name for name, value in vars(self).items() if value != getattr(Instruction, name) and value]
        if wrong := [f"--{name.replace('_', '-')}" for name in given if name not in of_texts]:
            what = f"{', '.join(wrong)} without --chat, or --prompt with --answer"
            raise PlanError(what, where=wrong[0], fix="name the field of the conversations with --chat")

    def documents(self, files: list[Path], on_bytes: Callable[[int], None]) -> Iterator[Part] | None:
        """The documents of --text; None without it."""
        return None if self.text is None else self._documents(files, self.text, on_bytes)

    def _documents(self, files: list[Path], name: str, on_bytes: Callable[[int], None]) -> Iterator[Part]:
        from runtime.data.instruction.conversation import text_of
        from runtime.data.instruction.rows import rows_of
        from runtime.data.text.pieces import Part

        for row in rows_of(files, self.split, on_bytes):
            if isinstance(row.value, PlanError):
                raise row.value
            try:
                content = text_of(row.value, name).encode()
            except PlanError as error:
                raise PlanError(error.what, where=row.where, fix=error.fix) from None
            if content.strip():
                yield Part(content, True, Path(row.where.rpartition(":")[0] or row.where), line=row.number + 1)

    def prepare(
        self, files: list[Path], output: Path, asked: Asked, on_bytes: Callable[[int], None]
    ) -> tuple[Header, list[str]]:
        """The header of the token file, and the lines to print."""
        from runtime.data.instruction.prepare import lines_of, prepare_samples, shown

        header, report, chat = prepare_samples(files, output, asked, on_bytes, self.show)
        if self.json:
            return header, [json.dumps(each, ensure_ascii=False) for each in shown(report, chat)]
        return header, [*lines_of(report, asked, chat), *(_in_words(each) for each in shown(report, chat))]

    def overlong(self, tokens: Tokens) -> str:
        """What --length counts."""
        from runtime.data.objectives.overlong import counts_of

        assert self.length is not None
        return counts_of(tokens, self.length)


def _in_words(sample: dict[str, Any]) -> str:
    """The text of a sample, with its labels marked."""
    text, found = sample["text"], []
    for part in reversed(sample["supervised"]):
        head, _, tail = text.rpartition(part)
        text, found = head, [f"⟦{part}⟧", tail, *found]
    return f"row {sample['row']}, turn {sample['turn']}: {text}{''.join(found)}"


def _arguments(given: list[str]) -> dict[str, Any]:
    """Values as JSON, else as text. Raises PlanError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            what = f"--template-args {shorten(text, 60)} is not NAME=VALUE"
            raise PlanError(what, where="--template-args", fix="write enable_thinking=false")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
