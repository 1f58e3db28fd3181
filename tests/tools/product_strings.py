"""The English of a Python file: messages (errors, help, reports), docstrings, and comments.

A message is any string that is not a docstring and has three words in a row. A field of an f-string becomes ``…``, and
counts as a word.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator

_PROSE = re.compile(r"(?:[A-Za-z]+|…)[,;:]? (?:[A-Za-z]+|…)[,;:]? (?:[A-Za-z]+|…)")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


def messages(source: str) -> list[tuple[int, str]]:
    """(line, text) of each message, in the order of lines."""
    tree = ast.parse(source)
    skipped = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node and isinstance(part, ast.Constant)}
    found = [
        (node.lineno, _text(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in skipped
    ]
    return sorted((line, text) for line, text in found if _PROSE.search(text))


def docstrings(source: str) -> list[tuple[int, str]]:
    """(line, text) of each docstring of a module, a class or a function, without the indentation of its code."""
    return sorted((node.lineno, inspect.cleandoc(_text(node))) for node in _docstrings(ast.parse(source)))


def comments(source: str) -> list[tuple[int, str]]:
    """(line, text) of each comment; comments on adjacent lines are one."""
    found: list[tuple[int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if not found or found[-1][0] + len(found[-1][1]) != token.start[0]:
                found.append((token.start[0], []))
            found[-1][1].append(token.string.lstrip("# "))
    return [(line, "\n".join(texts)) for line, texts in found]


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, _DOCUMENTED) and node.body and isinstance(first := node.body[0], ast.Expr):
        value = first.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value
    for field in _STATEMENTS:  # faster than ast.walk, which visits expressions too
        children = getattr(node, field, None)
        for child in children if isinstance(children, list) else ():
            yield from _docstrings(child)


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
