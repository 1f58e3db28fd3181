"""A page of HTML read back: its elements in order, with their text, and that every tag is closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    def all(self, tag: str = "", of_class: str = "") -> Iterator[Element]:
        """Elements below this one, in the order of the page."""
        for child in self.children:
            if isinstance(child, Element):
                if tag in ("", child.tag) and (not of_class or of_class in child.classes):
                    yield child
                yield from child.all(tag, of_class)

    def first(self, tag: str = "", of_class: str = "", id: str = "") -> Element:
        return next(e for e in self.all(tag, of_class) if id in ("", e.attributes.get("id")))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.stack[-1].children.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag, attrs):
        self.stack[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self.stack.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.stack[-1].children.append(data)


def read_page(text: str) -> Element:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.stack) == 1, [e.tag for e in reader.stack]
    return reader.stack[0]
