"""A page in a real browser without a screen: what its script makes of it, a picture of it, and its print."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
TIMEOUT_SECONDS = 120
_ERRORS = "<script>window.errors = []; window.addEventListener('error', (e) => errors.push(e.message));</script>"
_ANSWER = """<script>window.addEventListener("load", () => {{
  let answer = null;
  try {{ answer = (() => {{ {script} }})(); }} catch (error) {{ errors.push(`${{error}}`); }}
  const element = document.createElement("pre");
  element.id = "answer"; element.textContent = JSON.stringify({{ answer, errors }});
  document.body.append(element);
}});</script>"""


def chromium(page: Path, *options: str, width: int = 1280, height: int = 900, dark: bool = False) -> str:
    """What a run of the browser on a file prints."""
    assert CHROMIUM is not None
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}",
        "--virtual-time-budget=5000", *scheme, *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def ask(text: str, folder: Path, script: str, **window: Any) -> Any:
    """What ``script`` returns when the page ``text`` has loaded; no script of the page may have failed."""
    page = folder / "page.html"
    text = text.replace("<head>", f"<head>{_ERRORS}", 1)
    page.write_text(text.replace("</body>", f"{_ANSWER.format(script=script)}</body>"), encoding="utf-8")
    found = re.search(r'<pre id="answer">(.*?)</pre>', chromium(page, "--dump-dom", **window), re.DOTALL)
    assert found, "the page did not load"
    answer = json.loads(html.unescape(found[1]))
    assert answer["errors"] == []
    return answer["answer"]
