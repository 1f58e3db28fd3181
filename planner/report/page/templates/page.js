"use strict";
document.documentElement.classList.add("js");

/* Tables: a click on a heading sorts, words in the field leave the rows that have them all. */
const UNITS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, us: 1e-6, ms: 1e-3, s: 1, GB: 1e9, MB: 1e6, "%": 0.01 };
function value(text) {
  const found = /^([\d,]*\.?\d+(?:e[+-]?\d+)?) ?(\S+)?/.exec(text);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : null;
}
function compare(a, b) {
  const [x, y] = [value(a), value(b)];
  if (x !== null && y !== null && x !== y) return x - y;
  return a.localeCompare(b, "en", { numeric: true });
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(text(a), text(b)) * (down ? -1 : 1));
      table.tBodies[0].append(...rows);
    });
  });
}
for (const field of document.querySelectorAll("input.filter")) {
  const rows = [...document.getElementById(field.getAttribute("aria-controls")).tBodies[0].rows];
  const told = field.closest(".tools").querySelector("output");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    told.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  });
}
