"""Every command of the guide runs as it stands there, and prints what stands there."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
from typer.main import get_command

from runtime.cli import app
from runtime.fuzz.forks import StoreHost
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

GUIDE = ROOT / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
CODES = re.compile(r"\s+# exit code (\d)$")


@dataclass(frozen=True)
class Command:
    """``words`` behind the $, the exit code that it says, and the lines that it prints."""

    words: tuple[str, ...]
    code: int
    lines: tuple[str, ...]


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """(what stands behind the language, text) of each block."""
    return ((name, text) for found, name, text in BLOCK.findall(page.read_text()) if found == language)


def commands(page: Path, *, elsewhere: bool = False) -> list[Command]:
    found = []
    for name, text in blocks(page, "console"):
        if bool(name) == elsewhere:
            found += [_command(part) for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    return found


def _command(text: str) -> Command:
    first, *lines = text.rstrip("\n").split("\n")
    code = CODES.search(first)
    words = tuple(shlex.split(CODES.sub("", first)))
    return Command(words, int(code[1]) if code else 0, tuple(line.rstrip() for line in lines))


def pattern(lines: tuple[str, ...]) -> re.Pattern[str]:
    """``…`` in a line is any part of it, as a whole line any lines; blanks count once."""
    parts = []
    for line in lines:
        if line.strip() == LEFT_OUT:
            parts.append(r"(?:.*\n)*?")
        elif line.strip():
            words = line.split()
            parts.append(r"[ \t]*" + r"[ \t]+".join(_word(word) for word in words) + r"[ \t]*\n")
    return re.compile("".join(parts))


def _word(word: str) -> str:
    return ".*".join(re.escape(part) for part in word.split(LEFT_OUT))


class Page:
    """A page of the guide in a folder of its own, with the files that it shows. Its commands run in their order."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder, self.commands = folder, commands(path)
        self.done: list[subprocess.CompletedProcess[str]] = []
        for name in ("examples", "specs"):
            (folder / name).symlink_to(ROOT / name)
        for language in ("python", "yaml", "json"):
            for name, text in blocks(path, language):
                (folder / name).write_text(text)

    def reach(self, place: int) -> subprocess.CompletedProcess[str]:
        """What the command at ``place`` did; those before it have run."""
        for command in self.commands[len(self.done) : place + 1]:
            self.done.append(run(command.words, self.folder))
        return self.done[place]


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Page]:
    return cache(lambda path: Page(path, tmp_path_factory.mktemp(path.stem)))


TRAINS = pytest.mark.thorough  # for seconds, on four processes
CASES = [
    pytest.param(
        page, place, id=f"{page.stem}: {' '.join(command.words)}", marks=[TRAINS] if "train" in command.words else []
    )
    for page in PAGES
    for place, command in enumerate(commands(page))
]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("path", "place"), CASES)
def test_a_command_prints_what_stands_there(path: Path, place: int, page_of: Callable[[Path], Page]) -> None:
    page = page_of(path)
    if any("--peft" in command.words for command in page.commands):
        pytest.importorskip("peft")
    command, done = page.commands[place], page.reach(place)
    assert command.words[0] in ("meshwright", "python")
    assert done.returncode == command.code, done.stdout + done.stderr
    printed = done.stdout + done.stderr if command.code == 2 else done.stdout
    text = re.sub(r"\n\s*\n", "\n", printed)
    assert pattern(command.lines).search(text), f"{' '.join(command.words)}\n{printed}"


def run(words: tuple[str, ...], directory: Path) -> subprocess.CompletedProcess[str]:
    """In a fork of a process that has imported all: the import would take most of the time of most commands."""
    if words[0] == "python":
        given = [sys.executable, *words[1:]]
        return subprocess.run(given, cwd=directory, capture_output=True, text=True, timeout=HANG_SECONDS)
    return session_lab().call(_run, words[1:], str(directory))


def _run(_: StoreHost, words: tuple[str, ...], directory: str) -> subprocess.CompletedProcess[str]:
    os.chdir(directory)
    os.environ["COLUMNS"] = "200"
    printed = [open(f".{name}", "a+") for name in ("out", "err")]  # noqa: SIM115  the process ends after them
    for descriptor, file in zip((1, 2), printed, strict=True):
        os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = printed
    try:
        app(words)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = (_text(file) for file in printed)
    return subprocess.CompletedProcess(words, code, out, err)


def _text(file: TextIO) -> str:
    """All that this process and those that it began have printed."""
    file.flush()
    return Path(file.name).read_text()


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p, elsewhere=True)], ids=lambda p: p.stem)
def test_what_runs_elsewhere_is_spelled_right(page: Path) -> None:
    for command in commands(page, elsewhere=True):
        words = command.words
        assert words[0] == "torchrun"
        name, *arguments = words[words.index("runtime.cli") + 1 :]
        get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_python_blocks_that_are_files_compile() -> None:
    texts = [(page.name, name, text) for page in PAGES for name, text in blocks(page, "python")]
    assert len(texts) >= 4
    for page, name, text in texts:
        compile(text, f"{page}:{name}", "exec")


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\((\w+\.md)\)", (GUIDE / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}


def test_a_line_that_is_not_printed_is_seen() -> None:
    lines = ("a 1 …", "…", "c …3")
    assert pattern(lines).search("x\na  1 2\nb\nc 33\n")
    assert not pattern(lines).search("x\na  1 2\nb\nc 34\n")
    assert not pattern(("a", "c")).search("a\nb\nc\n")
