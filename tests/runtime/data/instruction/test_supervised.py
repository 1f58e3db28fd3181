"""Labels are the tokens that the model would generate, where it would generate them: each template, conversation and
tokenizer keeps the rule or refuses the row, and four wrong rules fail."""

import copy
from functools import cache
from typing import Any

import pytest

from runtime.data.instruction import supervised
from runtime.data.instruction.chat_tokenizer import ChatTokenizer
from runtime.data.instruction.conversation import Conversation, conversation_of
from runtime.data.instruction.presence import Frames, Presence
from runtime.data.instruction.supervised import MERGED, OTHER, Rule, Sample, Turn
from runtime.data.text.documents import RowError
from tests.tools.chat_tokenizers import QUOTES, SPLITS, TEMPLATES, chat_directory, samples_of, talk

pytest.importorskip("transformers")

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {}}}]
TALKS: dict[str, list[dict[str, Any]]] = {
    "short": talk("hi", "yes"),
    "system": talk("hi there", "hello you", system="Answer in the shortest way that you can."),
    "turns": talk("hi there", "hello you, how are you doing today?", "well", "good", "and now?", "the end"),
    "twice": talk("yes", "yes", "yes", "yes"),
    "markup": talk("user", "assistant", "im_end", "end"),
    "reasoning": talk("2 + 2?", {"content": "4", "reasoning_content": "add them up"}),
    "reasonings": talk("a?", {"content": "b", "reasoning_content": "c"}, "d?", {"content": "e", "reasoning": "f"}),
    "unicode": talk("größer 你好 🙂 שלום", "naïve 🙂🙂 é́"),
    "spaces": talk("  hi  \n", "\n  hello \n\n", " more ", "  "),
    "empty": talk("say nothing", "", "again", ""),
    "tools": [
        *talk("the weather in Rome?", {"content": "", "tool_calls": [CALL]}),
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ],
    "context": talk("a?", {"content": "left out", "train": False}, "b?", "kept"),
}
ENDS = {"eos_behind": "<|end|>", "eos_directly": "<|end|>", "next_role": "<|user|>", "words": "<|endoftext|>"}
ENDS |= {"channels": "<|return|>", "moves_system": "<|endoftext|>"}
MADE = {**dict.fromkeys(TEMPLATES, 9), "thinks": 12, "prefills": 0, "channels": 11, "cuts": 7}  # those not refused
MADE |= {"drops_system": 8, "raises": 8}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def chat(template: str, split: str) -> ChatTokenizer:
        ends = ["<|endoftext|>", "<|user|>"] if template == "next_role" else None
        path = chat_directory(tmp_path_factory.mktemp("template") / "model", template, split, ends)
        return ChatTokenizer(str(path), date="2025-03-04")

    return chat


def talk_of(name: str) -> Conversation:
    row = {"messages": TALKS[name], **({"tools": TOOLS} if name == "tools" else {})}
    return conversation_of(row, "messages", None, "all")


def check(chat: ChatTokenizer, talk: Conversation, samples: list[Sample], end: str) -> None:
    """The rule, by transformers' own calls."""
    bare = copy.deepcopy(chat.tokenizer)
    if hasattr(bare.backend_tokenizer.pre_tokenizer, "add_prefix_space"):
        bare.backend_tokenizer.pre_tokenizer.add_prefix_space = False
    more = {"tools": talk.tools, "date_string": "04 Mar 2025"}
    own = chat.tokenizer
    spans = [(sample, *span) for sample in samples for span in sample.answers]
    for number, (sample, start, stop) in zip(talk.trained, spans, strict=True):
        before, upto = talk.messages[:number], talk.messages[: number + 1]
        context = own.apply_chat_template(before, add_generation_prompt=True, tokenize=False, **more)
        seen = own.apply_chat_template(before, add_generation_prompt=True, tokenize=True, **more)["input_ids"]
        whole = own.apply_chat_template(upto, tokenize=False, **more)
        assert sample.ids[:start] == seen
        assert sample.ids[stop - 1] == own.convert_tokens_to_ids(end)
        answer = whole[len(context) :]
        text = answer[: answer.index(end) + len(end)] if end in answer else answer + end
        assert sample.ids[start:stop] == bare(text, add_special_tokens=False)["input_ids"]
        for field in ("content", "reasoning_content", "reasoning"):
            assert (talk.messages[number].get(field) or "").strip() in text
    alone = [sample.ids[:stop] for sample, _, stop in spans]
    assert (len(samples) == 1) == all(ids == alone[-1][: len(ids)] for ids in alone)


def run(chats: Any, template: str, split: str) -> int:
    """How many conversations are not refused; each keeps the rule."""
    made, chat = 0, chats(template, split)
    for name in TALKS:
        talk = talk_of(name)
        try:
            found = samples_of(talk, Rule(chat))
        except RowError:
            continue
        check(chat, talk, found, ENDS.get(template, "<|im_end|>"))
        made += 1
    return made


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_conversation_keeps_the_rule_or_is_refused(chats: Any, template: str, split: str) -> None:
    assert run(chats, template, split) == MADE[template]


def contexts_only(turns: list[Sample]) -> list[Sample]:
    last, spans = turns[-1].ids, [turn.answers[0] for turn in turns]
    is_kept = all(turn.ids[:start] == last[:start] for turn, (start, _) in zip(turns, spans, strict=True))
    return [Sample(last, spans)] if is_kept else turns


def common_text(self: Any, context: str, whole: str, where: str) -> int:
    pairs = enumerate(zip(context, whole, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(context), len(whole)))


def at_once(self: Any, turn: Turn) -> Sample:
    context = "".join(turn.context)
    found = self.chat.tokenizer.backend_tokenizer.encode(context + turn.answer, add_special_tokens=False)
    border = next((n for n, (start, _) in enumerate(found.offsets) if start >= len(context)), len(found.ids))
    ids = [*found.ids, *turn.end]
    return Sample(ids, [(border, len(ids))])


def eos_as_end(self: Any, before: Any, message: Any, whole: str, last: int) -> tuple[int, int | None]:
    return last, self.chat.eos


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (supervised, "joined", contexts_only),
        (supervised.Turns, "_common", common_text),
        (supervised.Turns, "_by_itself", at_once),
        (supervised.Turns, "_end", eos_as_end),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_wrong_rule_fails(chats: Any, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Any) -> None:
    monkeypatch.setattr(place, name, wrong)
    broken = []
    for template in TEMPLATES:
        try:
            run(chats, template, "qwen")
        except AssertionError:
            broken.append(template)
    assert broken


def refused(chats: Any, template: str, row: dict[str, Any], **more: Any) -> RowError:
    rule = Rule(chats(template, "qwen"), **more)
    with pytest.raises(RowError) as error:
        samples_of(conversation_of({"messages": [], **row}, "messages", None, "all"), rule)
    return error.value


def test_a_row_whose_context_generation_does_not_see_shows_both_texts_and_the_fixes(chats: Any) -> None:
    error = refused(chats, "prefills", {"messages": talk("hi", "yes")})
    assert "assistant\\n<think>\\n'" in error.what
    assert "assistant\\nyes<|im_end|>" in error.what
    assert all(option in error.fix for option in ("--template-args", "--chat-template", "--border common"))


def test_a_common_border_is_the_common_prefix_in_ids_and_counted(chats: Any) -> None:
    chat = chats("prefills", "qwen")
    rule = Rule(chat, common=True)
    (sample,) = samples_of(conversation_of({"m": talk("hi", "yes")}, "m", None, "all"), rule)
    assert chat.text(sample.ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert [chat.text(sample.ids[a:b]) for a, b in sample.answers] == ["yes<|im_end|>"]
    assert rule.counts[OTHER] == 1


def test_rows_with_a_border_that_would_merge_are_counted(chats: Any) -> None:
    for template, count in (("newline_first", 1), ("chatml", 0)):
        rule = Rule(chats(template, "qwen"))
        samples_of(talk_of("turns"), rule)
        assert rule.counts[MERGED] == count


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        ("chatml", {"messages": TALKS["reasoning"]}, "the template drops reasoning_content 'add them up'"),
        ("chatml", {"messages": TALKS["tools"], "tools": TOOLS}, "the template drops tool"),
        ("chatml", {"messages": talk("hi", "yes"), "tools": TOOLS}, "the template drops tools 'get_weather'"),
        (
            "drops_system",
            {"messages": talk("hi", "yes", system="s")},
            "the context of message 2: the template drops content 's'",
        ),
        (
            "cuts",
            {"messages": talk("hi", "a text that is longer than twenty")},
            "message 1: the template drops content",
        ),
        (
            "raises",
            {"messages": talk("hi", "yes", system="s")},
            "the chat template fails: TemplateError: no system message",
        ),
        ("chatml", {"messages": talk("hi", "no<|im_end|>")}, "holds the special token <|im_end|>"),
        ("chatml", {"messages": talk("hi", [{"type": "image"}])}, "a part of the kind image, which needs a processor"),
        ("chatml", {"messages": [{"role": "asistant", "content": "x"}]}, "the unknown role 'asistant'"),
        ("chatml", {"messages": [{"role": "assistant", "content": "x"}]}, "the chat template fails"),
        ("chatml", {"messages": "{"}, "messages is a text that is not JSON"),
        ("chatml", {}, "has no list of messages"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            {"messages": talk("a", "b")},
            "longer than",
        ),
    ],
)
def test_a_row_that_would_lose_something_is_refused(
    chats: Any, monkeypatch: pytest.MonkeyPatch, template: str, row: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("runtime.data.instruction.template._MOST_SECONDS", 0.2)
    assert words in refused(chats, template, {"messages": [], **row} if "messages" in row else {"other": 1}).what


def test_a_field_that_may_be_dropped_is_counted(chats: Any) -> None:
    rule = Rule(chats("chatml", "qwen"), ignored={"reasoning_content"})
    samples_of(talk_of("reasoning"), rule)
    assert sum(count for what, count in rule.counts.items() if "reasoning_content" in what) == 1


def test_special_tokens_inside_a_tool_call_do_not_end_it(chats: Any) -> None:
    chat = chats(QUOTES, "qwen")
    (sample,) = samples_of(talk_of("tools"), Rule(chat))
    found = [chat.text(sample.ids[start:stop]) for start, stop in sample.answers]
    assert found == ["get_weather(city=<|quote|>Rome<|quote|>,days=2,)<|call|>", "It is sunny.<|end|>"]


class Searched(str):
    """A rendering that counts how often all of it is searched."""

    num_searches = 0

    def __contains__(self, text: object) -> bool:
        self.num_searches += 1
        return super().__contains__(text)  # pyright: ignore


def test_many_arguments_are_looked_up_and_not_searched_one_by_one() -> None:
    names = [f"k{i}" for i in range(500)]
    rendered, presence = Searched(" ".join(names)), Presence((), set(), Frames())
    presence.require("tool_calls", names, rendered, "message 1")
    assert rendered.num_searches == 0
    presence.require("tool_calls", [*names, "k4 k5"], rendered, "message 1")
    with pytest.raises(RowError, match="message 1: the template drops tool_calls 'k500'"):
        presence.require("tool_calls", [*names, "k500"], rendered, "message 1")


def outcome(name: str, rule: Rule) -> list[Sample] | str:
    try:
        return samples_of(talk_of(name), rule)
    except RowError as error:
        return error.what


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_what_earlier_rows_showed_of_a_template_changes_no_row(chats: Any, template: str) -> None:
    chat = chats(template, "qwen")
    rule = Rule(chat)
    for name in [*TALKS, *TALKS]:
        assert outcome(name, rule) == outcome(name, Rule(chat)), name


def test_short_rows_of_a_shape_that_was_seen_are_rendered_once_for_each_text(
    chats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, rendered = chats("chatml", "qwen"), list[int]()
    render, rule = chat.render_seen, Rule(chat)

    def counted(cases: Any, tools: Any) -> list[str]:
        rendered[-1] += len(cases)
        return render(cases, tools)

    monkeypatch.setattr(chat, "render_seen", counted)
    for words in (("hi", "yes"), ("yo", "no")):
        rendered.append(0)
        samples_of(conversation_of({"messages": talk(*words)}, "messages", None, "all"), rule)
    assert rendered == [4, 2]


def test_a_text_that_a_template_replaces_is_told_behind_rows_of_its_shape(chats: Any) -> None:
    text = "{{ 'a' if m.content == 'b' else m.content }}"
    rule = Rule(chats("{% for m in messages %}<|user|>" + text + "<|end|>{% endfor %}", "qwen"))
    for asked in "acd":
        assert samples_of(conversation_of({"messages": talk(asked, "yes")}, "messages", None, "all"), rule)
    with pytest.raises(RowError, match="whether all of it is written is not known"):
        samples_of(conversation_of({"messages": talk("b", "yes")}, "messages", None, "all"), rule)


@pytest.mark.parametrize("number", ["999999999", "999999999 * 999", "messages | length * 999999999"])
def test_a_template_that_writes_without_end_is_one_error(chats: Any, number: str) -> None:
    with pytest.raises(RowError, match="the chat template fails: it takes more than 512 MiB"):
        chats("{{ 'x' * (" + number + ") }}", "qwen").render(talk("hi"), None)


def test_templates_see_the_given_day(chats: Any) -> None:
    (sample,) = samples_of(talk_of("short"), Rule(chats("channels", "qwen")))
    assert "2025-03-04" in chats("channels", "qwen").text(sample.ids)
    given = chats("{{ date_string }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}", "qwen")
    assert given.render(talk("a"), None) == "04 Mar 2025<|user|>a<|end|>"


def test_formats_are_detected_and_messages_behind_the_last_answer_are_left_out() -> None:
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    found = conversation_of({"c": [*sharegpt, {"from": "human", "value": "more"}]}, "c", None, "all")
    assert (found.format, found.num_behind, found.trained) == ("sharegpt", 1, [2])
    assert found.messages == talk("a", "b", system="s")
    alpaca = conversation_of({"instruction": "do", "input": "it", "output": "done"}, None, None, "all")
    assert (alpaca.format, alpaca.messages) == ("alpaca", talk("do\n\nit", "done"))
    last = conversation_of({"m": TALKS["twice"]}, "m", None, "last")
    assert last.trained == [3]
