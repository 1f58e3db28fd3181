"""The page in a real browser: nothing fails, nothing is cut off or unreadable, tables sort."""

from pathlib import Path

import pytest

from planner.frozen_plan import Plan
from planner.report.page.plan_page import plan_page
from tests.tools.browser import ask, needs_browser, printed

pytestmark = needs_browser

# Of each text that one sees: its colour against the nearest ground that is painted, as WCAG has it.
CONTRAST = """
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || e.closest("svg, script, style, [hidden]")) continue;
    if (!e.checkVisibility()) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => x - y);
    if ((b + 0.05) / (a + 0.05) < 4.5) poor.add(`${e.tagName}.${e.className}: ${walker.currentNode.data.trim()}`);
  }
  return [...poor];
"""

# Texts of one drawing that lie on one another, and what runs out of its drawing or of the page.
LAYOUT = """
  const found = [];
  if (document.documentElement.scrollWidth > document.documentElement.clientWidth) {
    found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  }
  for (const svg of document.querySelectorAll("main svg")) {
    const frame = svg.getBoundingClientRect();
    const all = [...svg.querySelectorAll("text")].slice(0, 400);
    const texts = all.map((t) => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([text, r], i) => {
      if (!r.width) return;
      const out = r.left < frame.left - 1 || r.right > frame.right + 1 || r.bottom > frame.bottom + 1;
      if (out) found.push(`cut off: ${text}`);
      for (const [other, q] of texts.slice(i + 1)) {
        const x = Math.min(r.right, q.right) - Math.max(r.left, q.left);
        const y = Math.min(r.bottom, q.bottom) - Math.max(r.top, q.top);
        if (x > 1 && y > 3) found.push(`${text} lies on ${other}`);
      }
    });
  }
  return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read(moe_text: str, tmp_path: Path, dark: bool):
    assert ask(moe_text, tmp_path, CONTRAST, dark=dark) == []


@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_is_cut_off_or_lies_on_something_else(moe_text: str, tmp_path: Path, width: int):
    assert ask(moe_text, tmp_path, LAYOUT, width=width) == []


def test_tables_sort_by_number_and_filter_by_words(moe_plan: Plan, moe_text: str, tmp_path: Path):
    script = """
      const all = [...document.querySelectorAll("section.table")];
      const section = all.find((s) => s.textContent.trim().startsWith("Collectives"));
      const heads = [...section.querySelectorAll("th")];
      const column = heads.findIndex((h) => h.textContent.startsWith("bytes"));
      const rows = () => [...section.querySelectorAll("tbody tr:not([hidden])")];
      const cells = () => rows().map((row) => row.cells[column].textContent);
      const before = cells();
      heads[column].querySelector("button").click();
      const up = cells(), sort = heads[column].getAttribute("aria-sort");
      heads[column].querySelector("button").click();
      const down = cells();
      const field = section.querySelector("input");
      field.value = "ALL_TO_ALL forward";
      field.dispatchEvent(new Event("input"));
      return { before, up, sort, down, left: cells().length, told: section.querySelector("output").textContent };
    """
    found = ask(moe_text, tmp_path, script)
    numbers = [[int(cell.replace(",", "")) for cell in found[name]] for name in ("before", "up", "down")]
    assert numbers[1] == sorted(numbers[0])
    assert numbers[2] == sorted(numbers[0], reverse=True)
    assert found["sort"] == "ascending"
    assert 0 < found["left"] < len(numbers[0])
    assert found["told"] == f"{found['left']} of {len(numbers[0])} rows"


def test_it_prints(moe_text: str, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(moe_text, encoding="utf-8")
    assert printed(page).startswith(b"%PDF")


def test_the_page_of_a_plan_made_by_hand_is_sound(small_plan: Plan, tmp_path: Path):
    assert ask(plan_page(small_plan, full=True), tmp_path, LAYOUT) == []
