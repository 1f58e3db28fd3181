"use strict";
document.documentElement.classList.add("js");

/* What an item is, beside the picture: of the line under the pointer, or the one that has the focus. */
for (const look of document.querySelectorAll(".look.of-items")) {
  const picture = look.parentElement;
  const show = (event) => {
    const item = event.target.closest(".item");
    if (!item || look.shown === item) return;
    look.shown = item;
    const title = document.createElement("h3"), told = document.getElementById((item.getAttribute("href") ?? "").slice(1));
    title.textContent = item.dataset.name;
    look.replaceChildren(title, (told ?? item).querySelector(".facts-of").cloneNode(true));
  };
  picture.addEventListener("pointerover", show);
  picture.addEventListener("focusin", show);
}

/* A link to something folded opens it. */
const unfold = () => {
  const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found instanceof HTMLDetailsElement) found.open = true;
};
window.addEventListener("hashchange", unfold);
unfold();

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

/* Devices: where a rank is drawn, its coordinates and its groups follow from sizes and strides. */
const given = document.getElementById("devices-data");
if (given) {
  const d = JSON.parse(given.textContent);
  const [grid, field, axis, by] = ["grid", "rank", "axis", "by"].map((id) => document.getElementById(id));
  const box = { x: d.across * d.cell + d.gap, y: d.down * d.cell + d.gap };
  const names = { tp: "etp", dp: "edp" };
  const axes = d.axes.dense.map(([name, size, stride]) => ({ name, size, stride }));
  for (const [name, size, stride] of d.axes.expert) {
    if (name !== "pp") axes.push({ name: names[name] ?? name, size, stride });
  }
  const at = (rank, a) => Math.floor(rank / a.stride) % a.size;
  const place = (rank) => {
    const node = Math.floor(rank / d.node), inside = rank % d.node;
    return [
      (node % d.nodes) * box.x + (inside % d.across) * d.cell,
      Math.floor(node / d.nodes) * box.y + Math.floor(inside / d.across) * d.cell,
    ];
  };
  const rankAt = (x, y) => {
    const [column, row] = [Math.floor(x / box.x), Math.floor(y / box.y)];
    const [i, j] = [Math.floor((x - column * box.x) / d.cell), Math.floor((y - row * box.y) / d.cell)];
    if (x < 0 || y < 0 || column >= d.nodes || i >= d.across || j >= d.down) return -1;
    const inside = j * d.across + i, rank = (row * d.nodes + column) * d.node + inside;
    return inside < d.node && rank < d.drawn ? rank : -1;
  };
  const part = (a) => a.name.split("-").map((name) => axes.find((other) => other.name === name)).filter(Boolean);
  const members = (rank, name) => {
    let found = [rank];
    for (const a of part({ name })) {
      found = Array.from({ length: a.size }, (_, i) => found.map((r) => r + (i - at(r, a)) * a.stride)).flat();
    }
    return found.sort((a, b) => a - b);
  };
  const words = (ranks) => {
    if (ranks.length <= 12) return ranks.join(", ");
    const step = ranks[1] - ranks[0], even = ranks.every((r, i) => !i || r - ranks[i - 1] === step);
    return `${ranks.slice(0, 3).join(", ")}, … ${ranks.at(-1)} (${ranks.length}${even && step > 1 ? `, in steps of ${step}` : ""})`;
  };
  const outline = (ranks) => ranks.filter((r) => r < d.drawn).map((r) => {
    const [x, y] = place(r);
    return `M${x} ${y}h${d.cell}v${d.cell}h-${d.cell}z`;
  }).join("");
  const put = (list, what, text) => {
    for (const [tag, content] of [["dt", what], ["dd", text]]) {
      const element = document.createElement(tag);
      element.textContent = content;
      list.append(element);
    }
  };
  const choose = (rank) => {
    if (!(rank >= 0 && rank < d.world)) return;
    field.value = rank;
    document.getElementById("mark").setAttribute("d", outline([rank]));
    document.getElementById("members").setAttribute("d", axis.value ? outline(members(rank, axis.value)) : "");
    const title = document.createElement("h3"), list = document.createElement("dl");
    title.textContent = `rank ${rank}`;
    list.className = "facts-of";
    put(list, "node", `${Math.floor(rank / d.node)}, device ${rank % d.node} of it`);
    for (const a of axes) put(list, a.name, `${at(rank, a)} of ${a.size}`);
    for (const option of axis.options) {
      const ranks = members(rank, option.value);
      const nodes = new Set(ranks.map((r) => Math.floor(r / d.node))).size;
      put(list, `${option.value} group`, `${words(ranks)}\n${nodes > 1 ? `over ${nodes} nodes` : "in one node"}`);
    }
    document.getElementById("chosen").replaceChildren(title, list);
  };
  const paint = () => {
    const a = axes.find((other) => other.name === by.value);
    const paths = Array.from({ length: d.colours }, () => []);
    for (let rank = 0; rank < d.drawn; rank++) paths[a ? at(rank, a) % d.colours : 0].push(rank);
    for (const old of grid.querySelectorAll(".fill")) old.remove();
    const legend = document.getElementById("colours");
    legend.replaceChildren();
    paths.forEach((ranks, i) => {
      if (!ranks.length) return;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", `fill f${i}`);
      path.setAttribute("d", outline(ranks));
      grid.querySelector("defs").after(path);
      const line = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = `swatch f${i}`;
      const more = a && a.size > i + d.colours ? `, ${i + d.colours}${a.size > i + 2 * d.colours ? ", …" : ""}` : "";
      line.append(swatch, `${by.value} ${i}${more}`);
      legend.append(line);
    });
  };
  by.replaceChildren(...axes.map((a) => new Option(a.name)));
  if (!axes.some((a) => a.name === "pp")) by.prepend(new Option("pp"));
  by.value = "pp";
  by.addEventListener("change", paint);
  axis.addEventListener("change", () => choose(+field.value));
  field.addEventListener("input", () => choose(field.value === "" ? -1 : +field.value));
  grid.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(grid.getScreenCTM().inverse());
    const rank = rankAt(point.x, point.y);
    if (rank >= 0 && rank !== +field.value) choose(rank);
  });
  const line = d.node * d.nodes;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: line, ArrowUp: -line };
  grid.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(+field.value + step);
  });
  choose(0);
}
