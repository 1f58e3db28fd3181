/* The values under the pointer, or where the arrow keys have led. */
for (const figure of document.querySelectorAll(".charts figure")) {
  const svg = figure.querySelector(".chart"), reading = figure.querySelector(".reading"), cursor = svg.querySelector(".cursor");
  const lines = JSON.parse(reading.dataset.points), names = JSON.parse(reading.dataset.names), atEnd = reading.textContent;
  const steps = [...new Set(lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
  const first = steps[0], last = Math.max(steps.at(-1), first + 1);
  let at = steps.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], x = size.left + (step - first) / (last - first) * (size.right - size.left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const told = lines.map((line) => [line.name, line.points.findLast((p) => p[0] <= step)]).filter(([, p]) => p);
    reading.textContent = `${reading.dataset.along} ${names[step - 1] ?? step}: ${told.map(([name, p]) => `${name} ${p[1]}`).join("; ")}`;
  };
  const leave = () => {
    cursor.setAttribute("visibility", "hidden");
    reading.textContent = atEnd;
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * size.width;
    const step = first + (x - size.left) / (size.right - size.left) * (last - first);
    let near = 0;
    steps.forEach((other, i) => {
      if (Math.abs(other - step) < Math.abs(steps[near] - step)) near = i;
    });
    show(near);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -steps.length, End: steps.length }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    show(at + by);
    event.preventDefault();
  });
}
