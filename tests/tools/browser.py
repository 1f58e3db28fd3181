"""A page in a real browser without a screen: what its script makes of it, a picture of it, and its print.

One Chromium is started for all tests of a process and spoken to by its DevTools protocol, over two pipes:
https://chromedevtools.github.io/devtools-protocol. Each page has a tab of its own.
"""

import atexit
import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tools.limits import HANG_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
_ERRORS = "window.errors = []; window.addEventListener('error', (e) => errors.push(e.message));"
_LOADED = "new Promise((go) => document.readyState === 'complete' ? go() : addEventListener('load', go))"


class Browser:
    """Owns the process. It reads commands from file descriptor 3 and answers on 4, each message ended by a zero."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.mkdtemp()
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        words = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank",
        ]  # fmt: skip
        # the shell puts the pipes where Chromium looks for them; numbers above 9 are no file descriptors to it
        ends = [os.dup2(commands, 10 + commands), os.dup2(answers, 10 + answers)]
        script = f'exec "$@" 3</dev/fd/{ends[0]} 4>/dev/fd/{ends[1]}'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *words], pass_fds=ends, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (commands, answers, *ends):
            os.close(end)
        self._left, self._number = b"", 0
        atexit.register(self.end)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        """The result of a command; what else the browser says meanwhile is dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        answer = self.wait(lambda said: said.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def wait(self, is_it: Any) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            *whole, self._left = self._left.split(b"\0")
            for i, text in enumerate(whole):
                if is_it(said := json.loads(text)):
                    self._left = b"\0".join([*whole[i + 1 :], self._left])
                    return said
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser is gone, or says nothing"
            self._left += piece


@cache
def browser() -> Browser:
    return Browser()


@contextlib.contextmanager
def tab(page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
    """A file, loaded; gives a function that calls a method of its tab."""
    chrome = browser()
    target = chrome.call("Target.createTarget", url="about:blank")["targetId"]
    session = chrome.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(method: str, **values: Any) -> dict[str, Any]:
        return chrome.call(method, session, **values)

    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        call("Emulation.setEmulatedMedia", features=[scheme])
        call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        call("Emulation.setFocusEmulationEnabled", enabled=True)
        call("Page.enable")
        call("Page.addScriptToEvaluateOnNewDocument", source=_ERRORS)
        assert "errorText" not in call("Page.navigate", url=page.as_uri())
        call("Runtime.evaluate", expression=_LOADED, awaitPromise=True)
        yield call
    finally:
        chrome.call("Target.closeTarget", targetId=target)


def ask(text: str, folder: Path, script: str, **window: Any) -> Any:
    """What ``script`` returns when the page ``text`` has loaded; no script of the page may have failed."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    with tab(page, **window) as call:
        expression = f"(() => {{ const answer = (() => {{ {script} }})(); return {{ answer, errors }}; }})()"
        told = call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in told, told["exceptionDetails"]
    assert told["result"]["value"]["errors"] == []
    return told["result"]["value"].get("answer")


def printed(page: Path) -> bytes:
    """The page as a PDF."""
    with tab(page) as call:
        return base64.b64decode(call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
