// What a person does: search, zoom, select and move.

function drawCrumbs() {
  const box = $("crumbs");
  box.replaceChildren();
  const node = current();
  const steps = [["all", []], ...state.prefix.map((name, i) => [name, state.prefix.slice(0, i + 1)])];
  steps.forEach(([name, path], i) => {
    if (i) box.append(Object.assign(document.createElement("span"), { textContent: "›" }));
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
    button.addEventListener("click", () => zoomTo(path));
    box.append(button);
  });
  box.append(Object.assign(document.createElement("span"), { textContent: ` ${plural(node.tensors, "tensor")}, ${bytesText(node.bytes)}` }));
}
function zoomTo(path) {
  state.prefix = path;
  drawCrumbs();
  drawTreemap();
}
function search(query) {
  let matches;
  try {
    matches = matcher(query);
  } catch {
    $("matches").textContent = "not a regular expression";
    return;
  }
  state.query = query;
  state.rows = ROWS;
  shown = query ? tensors.filter((tensor) => matches(tensor.key)) : tensors;
  root = tree(shown);
  state.prefix = [];
  $("matches").textContent = query ? `${shown.length.toLocaleString("en")} of ${tensors.length.toLocaleString("en")}` : "";
  drawCrumbs(); drawTreemap(); drawTable(); drawLegend();
  if (query && shown.length && !shown.includes(state.selected)) select(largest(shown));
}
const largest = (list) => list.reduce((a, b) => (a && a.bytes >= b.bytes ? a : b), null);

const place = (event, canvas) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};
const inside = (box, x, y) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h;
function tip(event, text) {
  $("tip").hidden = !text;
  if (!text) return;
  $("tip").textContent = text;
  const { width, height } = $("tip").getBoundingClientRect();
  $("tip").style.left = `${Math.min(event.clientX + 12, innerWidth - width - 8)}px`;
  $("tip").style.top = `${event.clientY + 14 + height > innerHeight ? event.clientY - height - 8 : event.clientY + 14}px`;
}
const treemap = $("treemap"), grid = $("grid");
treemap.addEventListener("pointermove", (event) => {
  const [x, y] = place(event, treemap);
  const tile = tiles.find((box) => inside(box, x, y));
  const heading = tile ? null : headings.filter((box) => inside(box, x, y)).pop();
  treemap.style.cursor = tile || heading ? "pointer" : "default";
  if (tile) {
    const { tensor } = tile;
    tip(event, `${tensor.key}\n${tensor.dtype} ${shapeText(tensor.shape)}, ${bytesText(tensor.bytes)}\n${cutText(tensor)}, ${writersText(tensor)}`);
  } else tip(event, heading ? `${heading.node.path.join(".")}\n${plural(heading.node.tensors, "tensor")}, ${bytesText(heading.node.bytes)}` : "");
});
treemap.addEventListener("pointerleave", (event) => tip(event, ""));
treemap.addEventListener("click", (event) => {
  const [x, y] = place(event, treemap);
  const tile = tiles.find((box) => inside(box, x, y));
  if (tile) { select(tile.tensor); return; }
  const heading = headings.filter((box) => inside(box, x, y)).pop();
  if (heading) zoomTo(heading.node.path);
});
treemap.addEventListener("keydown", (event) => {
  if (event.key === "Escape" || event.key === "Backspace") zoomTo(state.prefix.slice(0, -1));
  else if (event.key === "Enter" && state.selected) zoomTo(partsOf(state.selected.key).slice(0, Math.min(state.prefix.length + 1, partsOf(state.selected.key).length - 1)));
  else if (event.key.startsWith("Arrow") && tiles.length) {
    const from = tiles.find((tile) => tile.tensor === state.selected);
    const next = from ? neighbour(from, event.key) : tiles[0];
    if (next) select(next.tensor);
  } else return;
  event.preventDefault();
});
function neighbour(from, key) {
  const dx = { ArrowLeft: -1, ArrowRight: 1 }[key] || 0, dy = { ArrowUp: -1, ArrowDown: 1 }[key] || 0;
  const cx = from.x + from.w / 2, cy = from.y + from.h / 2;
  let best = null, least = Infinity;
  for (const tile of tiles) {
    const x = tile.x + tile.w / 2 - cx, y = tile.y + tile.h / 2 - cy;
    const ahead = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
    if (tile === from || ahead <= 0.5) continue;
    if (ahead + 3 * aside < least) { least = ahead + 3 * aside; best = tile; }
  }
  return best;
}
let dragged = null;
grid.addEventListener("pointerdown", (event) => { dragged = [event.clientX, event.clientY]; grid.setPointerCapture(event.pointerId); });
grid.addEventListener("pointerup", () => { dragged = null; });
grid.addEventListener("pointermove", (event) => {
  if (dragged) {
    view.x -= event.clientX - dragged[0]; view.y -= event.clientY - dragged[1];
    dragged = [event.clientX, event.clientY];
    drawGrid();
    return;
  }
  const cell = state.selected && hit(...place(event, grid));
  tip(event, cell ? chunkText(state.selected, cell.number) : "");
});
grid.addEventListener("pointerleave", (event) => tip(event, ""));
grid.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoomBy(event.deltaY < 0 ? 1.25 : 0.8, ...place(event, grid));
}, { passive: false });
grid.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-40, 0], ArrowRight: [40, 0], ArrowUp: [0, -40], ArrowDown: [0, 40] }[event.key];
  if (event.key === "+" || event.key === "=") zoomBy(1.5);
  else if (event.key === "-") zoomBy(1 / 1.5);
  else if (event.key === "0") zoomBy(0);
  else if (step) { view.x += step[0]; view.y += step[1]; drawGrid(); } else return;
  event.preventDefault();
});
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => zoomBy({ in: 1.5, out: 1 / 1.5, reset: 0 }[button.dataset.zoom]));
}
for (const button of $("tensors").querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    const own = button.dataset.sort;
    state.up = state.sort === own ? !state.up : own === "key" || own === "dtype";
    state.sort = own;
    drawTable();
  });
}
$("more").addEventListener("click", () => { state.rows += ROWS * 5; drawTable(); });
$("search").addEventListener("input", () => search($("search").value.trim()));
$("colour").addEventListener("change", () => { drawTreemap(); drawGrid(); drawLegend(); });
const redraw = () => { drawTreemap(); drawGrid(); drawLegend(); };
$("theme").addEventListener("click", () => {
  const html = document.documentElement;
  const dark = html.dataset.theme ? html.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  html.dataset.theme = dark ? "light" : "dark";
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(document.querySelector("main"));
