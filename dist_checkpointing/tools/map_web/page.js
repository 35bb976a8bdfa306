// The data of the page, and texts about it.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const UNKNOWN = "writer not recorded";
const ROWS = 200, MOST_CHUNKS_LISTED = 500, MOST_CELLS = 250000;

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const tensors = data.tensors.map((row) => {
  const counts = row.chunk ? row.shape.map((extent, a) => Math.ceil(extent / row.chunk[a])) : null;
  const writers = [];
  for (const [writer, times] of row.writers) for (let i = 0; i < times; i++) writers.push(writer);
  return { ...row, counts, writers, count: counts ? product(counts) : row.pieces.length };
});
const total = tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
const ranks = [...new Set(data.writers.flat())].sort((a, b) => a - b);

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit++; }
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}
const shapeText = (shape) => shape.length ? shape.join(" × ") : "scalar";
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
function rangesText(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; i++) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j++;
    parts.push(j > i ? `${numbers[i]}–${numbers[j]}` : `${numbers[i]}`);
    i = j;
  }
  return parts.length > 6 ? `${parts.slice(0, 5).join(", ")}, … (${numbers.length})` : parts.join(", ");
}
const writerText = (writer) => {
  const own = data.writers[writer];
  if (!own.length) return UNKNOWN;
  return `rank${own.length > 1 ? "s" : ""} ${rangesText(own)}`;
};
const ranksOf = (tensor) =>
  [...new Set([...new Set(tensor.writers)].flatMap((w) => data.writers[w]))].sort((a, b) => a - b);
const writersText = (tensor) => {
  const own = ranksOf(tensor);
  return own.length ? `rank${own.length > 1 ? "s" : ""} ${rangesText(own)}` : UNKNOWN;
};
const cutText = (tensor) => tensor.count === 0 ? "no elements" : tensor.counts
  ? (tensor.count === 1 ? "whole" : `${tensor.counts.join(" × ")} of ${shapeText(tensor.chunk)}`)
  : plural(tensor.count, "piece");

// Colours, and functions that paint on a canvas.

const rankColours = new Map(data.ranks);
const dtypeColours = new Map(data.dtypes);
const cssCache = new Map();
function css(name) {
  if (!cssCache.has(name)) cssCache.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return cssCache.get(name);
}
let unknownColour = css("--unknown");
function coloursOf(tensor, writer) {
  if ($("colour").value === "dtype") return [dtypeColours.get(tensor.dtype)];
  const own = data.writers[writer];
  return own.length ? own.map((rank) => rankColours.get(rank)) : [unknownColour];
}
function fill(context, colours, x, y, w, h) {
  if (colours.length === 1) {
    context.fillStyle = colours[0];
    context.fillRect(x, y, w, h);
    return;
  }
  const shown = colours.slice(0, 16);
  shown.forEach((colour, i) => {  // written by several: stripes
    context.fillStyle = colour;
    const left = x + (w * i) / shown.length;
    context.fillRect(left, y, w / shown.length + 0.3, h);
  });
}
const inkCache = new Map();
function inkOn(colour) {
  if (!inkCache.has(colour)) {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
    inkCache.set(colour, 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#10151c" : "#fff");
  }
  return inkCache.get(colour);
}
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "…").width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 2 ? text.slice(0, low) + "…" : "";
}
function prepared(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return { context, width, height };
}

// The search, and the current prefix.

const state = { query: "", prefix: [], selected: null, sort: "bytes", up: false, rows: ROWS };
let shown = tensors;
function matcher(query) {
  const regex = query.length > 2 && query.startsWith("/") && query.endsWith("/");
  if (!regex) {
    const text = query.toLowerCase();
    return (key) => key.toLowerCase().includes(text);
  }
  const pattern = new RegExp(query.slice(1, -1), "i");
  return (key) => pattern.test(key);
}
const partsOf = (key) => key.split(/[./]/);
function tree(list) {
  const root = { name: "", path: [], children: new Map(), bytes: 0, tensors: 0 };
  for (const tensor of list) {
    const parts = partsOf(tensor.key);
    let node = root;
    node.bytes += tensor.bytes; node.tensors++;
    for (let depth = 0; depth < parts.length - 1; depth++) {
      let next = node.children.get("p:" + parts[depth]);
      if (!next) {
        next = { name: parts[depth], path: parts.slice(0, depth + 1), children: new Map(), bytes: 0, tensors: 0 };
        node.children.set("p:" + parts[depth], next);
      }
      node = next;
      node.bytes += tensor.bytes; node.tensors++;
    }
    node.children.set("t:" + tensor.key, { name: parts[parts.length - 1], tensor, bytes: tensor.bytes });
  }
  return root;
}
function collapsed(node) {
  let label = node.name;
  while (node.children.size === 1) {
    const only = node.children.values().next().value;
    if (only.tensor) return { label: label ? `${label}.${only.name}` : only.name, node: only };
    node = only;
    label = label ? `${label}.${node.name}` : node.name;
  }
  return { label, node };
}
let root = tree(tensors);
function current() {
  let node = root;
  for (const part of state.prefix) {
    const next = node.children.get("p:" + part);
    if (!next) break;
    node = next;
  }
  return node;
}

// All tensors: tiles in the order of their prefixes, area by size.

function squarified(items, x, y, w, h, place) {
  const sum = items.reduce((a, item) => a + item.weight, 0);
  const scale = (w * h) / sum;
  let from = 0;
  while (from < items.length) {
    const side = Math.max(1e-6, Math.min(w, h));
    let area = 0, worst = Infinity, to = from;
    const largest = items[from].weight * scale;
    while (to < items.length) {
      const next = area + items[to].weight * scale;
      const least = items[to].weight * scale;
      const ratio = Math.max((side * side * largest) / (next * next), (next * next) / (side * side * least));
      if (ratio > worst) break;
      worst = ratio; area = next; to++;
    }
    const thick = area / side;
    let along = 0;
    for (let i = from; i < to; i++) {
      const length = (items[i].weight * scale) / thick;
      if (w >= h) place(items[i], x, y + along, thick, length);
      else place(items[i], x + along, y, length, thick);
      along += length;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    from = to;
  }
}
let tiles = [], headings = [];
function drawTreemap() {
  if (document.body.classList.contains("single")) return;
  cssCache.clear();
  unknownColour = css("--unknown");
  const { context, width, height } = prepared($("treemap"));
  tiles = []; headings = [];
  const ink = css("--ink"), group = css("--group"), line = css("--line"), page = css("--panel");
  context.clearRect(0, 0, width, height);
  const start = current();
  if (!start.tensors) {
    context.fillStyle = css("--soft");
    context.fillText(state.query ? "Nothing matches." : "This checkpoint holds no tensors.", 10, 20);
    return;
  }
  const layOut = (node, x, y, w, h) => {
    const items = [...node.children.values()].map((child) => {
      const { label, node: inner } = child.tensor ? { label: child.name, node: child } : collapsed(child);
      // An empty tensor gets a tile too, so that it can be clicked.
      return { label, node: inner, weight: inner.bytes + start.bytes * 2e-5 + 1 };
    }).sort((a, b) => b.weight - a.weight || a.label.localeCompare(b.label, "en", { numeric: true }));
    squarified(items, x, y, w, h, (item, left, top, wide, high) => {
      if (item.node.tensor) {
        tiles.push({ tensor: item.node.tensor, label: item.label, x: left, y: top, w: wide, h: high });
        return;
      }
      if (wide < 24 || high < 30) {
        layOut(item.node, left, top, wide, high);
        return;
      }
      headings.push({ node: item.node, label: item.label, x: left, y: top, w: wide, h: high });
      layOut(item.node, left + 2, top + 17, wide - 4, high - 19);
    });
  };
  layOut(start, 0, 0, width, height);
  for (const box of headings) {
    context.fillStyle = group;
    context.fillRect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1);
    context.strokeStyle = line;
    context.strokeRect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1);
    context.fillStyle = ink;
    const name = fitted(context, box.label, box.w - 10);
    context.fillText(name, box.x + 5, box.y + 9.5);
    const used = context.measureText(name).width + 14;
    const size = bytesText(box.node.bytes);
    if (name && context.measureText(size).width < box.w - used - 6) {
      context.fillStyle = css("--soft");
      context.fillText(size, box.x + used, box.y + 9.5);
    }
  }
  for (const tile of tiles) drawTile(context, tile, page);
  const chosen = tiles.find((tile) => tile.tensor === state.selected);
  if (chosen) {
    // In two colours, so that it can be seen on any colour.
    for (const [name, wide] of [["--panel", 5], ["--ink", 2.5]]) {
      context.strokeStyle = css(name);
      context.lineWidth = wide;
      context.strokeRect(chosen.x + 1.5, chosen.y + 1.5, Math.max(1, chosen.w - 3), Math.max(1, chosen.h - 3));
    }
    context.lineWidth = 1;
  }
}
function drawTile(context, tile, page) {
  const { tensor } = tile;
  const gap = Math.min(tile.w, tile.h) > 5 ? 1 : 0;
  const x = tile.x + gap / 2, y = tile.y + gap / 2;
  const w = Math.max(0.4, tile.w - gap), h = Math.max(0.4, tile.h - gap);
  const { rows, columns, writerAt } = plane(tensor);
  if (tensor.counts && rows <= h / 2 && columns <= w / 2 && rows * columns <= 4096) {
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
      const top = y + (h * r) / rows, left = x + (w * c) / columns;
      fill(context, coloursOf(tensor, writerAt(r, c)), left, top, w / columns, h / rows);
      if (rows * columns > 1 && h / rows > 4 && w / columns > 4) {
        context.strokeStyle = page;
        context.globalAlpha = 0.55;
        context.strokeRect(left, top, w / columns, h / rows);
        context.globalAlpha = 1;
      }
    }
  } else {
    // Too small for single chunks: the share of each writer.
    let at = 0;
    for (const [writer, share] of shares(tensor)) {
      fill(context, coloursOf(tensor, writer), x, y + h * at, w, h * share + 0.2);
      at += share;
    }
  }
  if (w > 44 && h > 15) {
    const text = fitted(context, tile.label, w - 10);
    const size = bytesText(tensor.bytes);
    const both = h > 34 && context.measureText(size).width < w - 10;
    if (text) label(context, text, x + w / 2, y + h / 2, both ? size : "");
  }
}
function label(context, text, x, y, second) {
  const wide = Math.max(context.measureText(text).width, second ? context.measureText(second).width : 0) + 8;
  const high = second ? 30 : 15;
  context.fillStyle = css("--panel");
  context.globalAlpha = 0.86;
  context.fillRect(x - wide / 2, y - high / 2, wide, high);
  context.globalAlpha = 1;
  context.textAlign = "center";
  context.fillStyle = css("--ink");
  context.fillText(text, x, second ? y - 7 : y);
  if (second) {
    context.fillStyle = css("--soft");
    context.fillText(second, x, y + 8);
  }
  context.textAlign = "start";
}

// Which chunks a tensor has, and the plane through them that is drawn.

function plane(tensor, others = []) {
  const counts = tensor.counts;
  if (!counts) return { rows: 1, columns: 1, writerAt: () => tensor.writers[0] };
  const [row, column] = axesOf(tensor);
  const strides = counts.map((_, a) => product(counts.slice(a + 1)));
  const base = counts.reduce((sum, _, a) =>
    sum + (a === row || a === column ? 0 : (others[a] || 0) * strides[a]), 0);
  const numberAt = (r, c) =>
    base + (row === null ? 0 : r * strides[row]) + (column === null ? 0 : c * strides[column]);
  return {
    rows: row === null ? 1 : counts[row],
    columns: column === null ? 1 : counts[column],
    numberAt,
    writerAt: (r, c) => tensor.writers[numberAt(r, c)],
  };
}
function shares(tensor) {
  const sums = new Map();
  for (const writer of tensor.writers) sums.set(writer, (sums.get(writer) || 0) + 1);
  return [...sums].sort((a, b) => a[0] - b[0]).map(([w, n]) => [w, n / Math.max(1, tensor.writers.length)]);
}
/** The two axes that are drawn: those that are cut most, in their order. */
function axesOf(tensor) {
  const axes = tensor.shape.length;
  if (axes === 0) return [null, null];
  if (axes === 1) return [null, 0];
  const counts = tensor.counts || cutsOfPieces(tensor);
  const order = [...Array(axes).keys()].sort((a, b) => counts[b] - counts[a] || b - a);
  let chosen = order.filter((axis) => counts[axis] > 1).slice(0, 2);
  for (const axis of order) if (chosen.length < 2 && !chosen.includes(axis)) chosen.push(axis);
  return chosen.sort((a, b) => a - b);
}
function cutsOfPieces(tensor) {
  return tensor.shape.map((_, axis) => new Set(tensor.pieces.flatMap((piece) =>
    piece.map(([offset]) => offset[axis]))).size);
}
function chunkBox(tensor, number) {
  let rest = number;
  const index = [];
  for (let axis = tensor.counts.length - 1; axis >= 0; axis--) {
    index[axis] = rest % tensor.counts[axis];
    rest = Math.floor(rest / tensor.counts[axis]);
  }
  const offset = index.map((i, axis) => i * tensor.chunk[axis]);
  return [offset, offset.map((o, axis) => Math.min(tensor.chunk[axis], tensor.shape[axis] - o))];
}
function chunkBytes(tensor, number) {
  const boxes = tensor.counts ? [chunkBox(tensor, number)] : tensor.pieces[number];
  return boxes.reduce((sum, [, shape]) => sum + product(shape), 0) * tensor.itemsize;
}

// One tensor: its chunks to scale, and the list of them.

const view = { zoom: 1, x: 0, y: 0, others: [] };
function select(tensor, { focus = false } = {}) {
  state.selected = tensor;
  Object.assign(view, { zoom: 1, x: 0, y: 0, others: [] });
  $("detail-title").textContent = tensor ? tensor.key : "No tensor is selected";
  $("detail-facts").textContent = tensor
    ? `${tensor.dtype} ${shapeText(tensor.shape)} · ${bytesText(tensor.bytes)} · ${cutText(tensor)} · written by ${writersText(tensor)}`
    : "Select a tile or a row of the table.";
  $("grid").parentElement.hidden = !tensor;
  $("chunk-list").hidden = !tensor;
  showAxes();
  listChunks();
  drawTreemap();
  drawGrid();
  drawLegend();
  markRow();
  if (tensor) history.replaceState(null, "", `#tensor=${encodeURIComponent(tensor.key)}`);
  if (focus) $("detail").scrollIntoView({ block: "nearest" });
}
function showAxes() {
  $("axes").replaceChildren();
  const tensor = state.selected;
  if (!tensor) return;
  const drawn = axesOf(tensor);
  tensor.shape.forEach((extent, axis) => {
    if (drawn.includes(axis)) return;
    const many = tensor.counts ? tensor.counts[axis] : extent;
    if (many < 2) return;
    const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: many - 1, value: 0 });
    const text = document.createElement("span");
    const step = tensor.counts ? tensor.chunk[axis] : 1;
    const tell = () => {
      const begin = Number(input.value) * step, end = Math.min(extent, begin + step);
      text.textContent = step === 1 ? `index ${begin} of ${extent}` : `${begin} … ${end} of ${extent}`;
    };
    input.addEventListener("input", () => { view.others[axis] = Number(input.value); tell(); drawGrid(); });
    tell();
    const box = document.createElement("label");
    box.append(`axis ${axis}`, input, text);
    $("axes").append(box);
  });
}
function cells(tensor) {
  const [row, column] = axesOf(tensor);
  if (tensor.counts) {
    const grid = plane(tensor, view.others);
    const list = [];
    const chunkR = row === null ? 1 : tensor.chunk[row], chunkC = column === null ? 1 : tensor.chunk[column];
    const endR = row === null ? 1 : tensor.shape[row], endC = column === null ? 1 : tensor.shape[column];
    if (grid.rows * grid.columns > MOST_CELLS) return null;
    for (let r = 0; r < grid.rows; r++) for (let c = 0; c < grid.columns; c++) {
      const number = grid.numberAt(r, c);
      list.push({ number, writer: tensor.writers[number], r0: r * chunkR, c0: c * chunkC,
        r1: Math.min(endR, (r + 1) * chunkR), c1: Math.min(endC, (c + 1) * chunkC) });
    }
    return list;
  }
  const list = [];
  tensor.pieces.forEach((piece, number) => {
    for (const [offset, shape] of piece) {
      const seen = shape.every((extent, axis) => axis === row || axis === column ||
        ((view.others[axis] || 0) >= offset[axis] && (view.others[axis] || 0) < offset[axis] + extent));
      if (!seen) continue;
      const span = (axis) => axis === null ? [0, 1] : [offset[axis], offset[axis] + shape[axis]];
      const [r0, r1] = span(row), [c0, c1] = span(column);
      list.push({ number, writer: tensor.writers[number], r0, r1, c0, c1 });
    }
  });
  return list;
}
let hit = () => null;
function drawGrid() {
  const tensor = state.selected;
  hit = () => null;
  if (!tensor) return;
  cssCache.clear();
  unknownColour = css("--unknown");
  const { context, width, height } = prepared($("grid"));
  const soft = css("--soft"), ink = css("--ink"), panel = css("--panel");
  const [row, column] = axesOf(tensor);
  const tall = row === null ? 1 : tensor.shape[row], wide = column === null ? 1 : tensor.shape[column];
  $("grid").setAttribute("aria-label", `Chunks of ${tensor.key}: ${cutText(tensor)}. Plus and minus zoom, arrow keys move, 0 shows all.`);
  if (tensor.bytes === 0 || tall === 0 || wide === 0) {
    context.fillStyle = soft;
    context.fillText("This tensor has no elements.", 10, 20);
    $("scale").textContent = "";
    return;
  }
  const left = row === null ? 12 : 58, top = 30, roomW = width - left - 14, roomH = height - top - 14;
  let ratio = row === null ? 7 : wide / tall, squeezed = row === null;
  if (ratio > 6) { ratio = row === null ? 7 : 6; squeezed = true; }
  if (ratio < 1 / 3) { ratio = 1 / 3; squeezed = true; }
  let w = roomW, h = w / ratio;
  if (h > roomH) { h = roomH; w = h * ratio; }
  const offLeft = left, offTop = top;
  const scaleX = (w / wide) * view.zoom, scaleY = (h / tall) * view.zoom;
  const toX = (c) => offLeft + c * scaleX - view.x, toY = (r) => offTop + r * scaleY - view.y;
  const list = cells(tensor);
  context.save();
  context.beginPath();
  context.rect(left - 1, top - 1, width - left + 1, height - top + 1);
  context.clip();
  if (list === null) {
    context.fillStyle = soft;
    context.fillText(`${plural(tensor.count, "chunk")} are too many to draw: see the list.`, left, top + 20);
  }
  const drawn = [];
  for (const cell of list || []) {
    const x = toX(cell.c0), y = toY(cell.r0), cw = (cell.c1 - cell.c0) * scaleX, ch = (cell.r1 - cell.r0) * scaleY;
    if (x > width || y > height || x + cw < left || y + ch < top) continue;
    drawn.push({ cell, x, y, w: cw, h: ch });
    const colours = coloursOf(tensor, cell.writer);
    fill(context, colours, x, y, Math.max(0.6, cw), Math.max(0.6, ch));
    if (cw > 3 && ch > 3) {
      context.strokeStyle = panel;
      context.strokeRect(x, y, cw, ch);
    }
    // The label stands in the part that can be seen.
    const x0 = Math.max(x, left), x1 = Math.min(x + cw, width), y0 = Math.max(y, top), y1 = Math.min(y + ch, height);
    if (x1 - x0 > 26 && y1 - y0 > 15) {
      context.textAlign = "center";
      context.fillStyle = colours.length > 1 ? "#10151c" : inkOn(colours[0]);
      const own = data.writers[cell.writer];
      const who = own.length ? `rank ${rangesText(own)}` : "?";
      const long = context.measureText(who).width < x1 - x0 - 6;
      const name = long ? who : rangesText(own) || "?";
      const more = y1 - y0 > 52 && x1 - x0 > 80;
      if (context.measureText(name).width < x1 - x0 - 2) context.fillText(name, (x0 + x1) / 2, (y0 + y1) / 2 - (more ? 8 : 0));
      if (more) context.fillText(`#${cell.number} · ${bytesText(chunkBytes(tensor, cell.number))}`, (x0 + x1) / 2, (y0 + y1) / 2 + 9);
      context.textAlign = "start";
    }
  }
  context.restore();
  // The positions of the cuts, as many as fit.
  context.fillStyle = soft;
  const ticks = (values, at, room, paint) => {
    let last = -Infinity;
    for (const value of values) {
      const place = at(value);
      if (place < last + room) continue;
      last = place;
      paint(value, place);
    }
  };
  const edges = (a, b) => [...new Set((list || []).flatMap((cell) => [cell[a], cell[b]]))].sort((p, q) => p - q);
  context.textAlign = "center";
  ticks(edges("c0", "c1"), toX, 46, (value, x) => { if (x >= left - 1 && x <= width - 4) context.fillText(value, Math.min(Math.max(x, left + 4), width - 16), top - 8); });
  context.textAlign = "right";
  if (row !== null) ticks(edges("r0", "r1"), toY, 16, (value, y) => { if (y >= top - 1 && y <= height) context.fillText(value, left - 6, y); });
  context.textAlign = "start";
  context.fillStyle = ink;
  if (column !== null) context.fillText(`axis ${column} →`, left, 9);
  if (row !== null) context.fillText(`axis ${row} ↓`, 2, 9);
  const whole = tensor.shape.map((extent, axis) => [extent, axis]).filter(([extent, axis]) =>
    axis !== row && axis !== column && (!tensor.counts || tensor.counts[axis] === 1) && extent > 1 && tensor.counts);
  $("scale").textContent = [squeezed ? "Not to scale: one axis is far longer than the other." : "To scale.",
    whole.length ? `Not cut: ${whole.map(([extent, axis]) => `axis ${axis} (${extent})`).join(", ")}.` : "",
    "Wheel or + and − zoom, drag or arrows move."].join(" ");
  hit = (x, y) => drawn.find((d) => x >= d.x && x < d.x + d.w && y >= d.y && y < d.y + d.h)?.cell;
}
const placeText = (numbers) => `(${numbers.join(", ")})`;
function chunkText(tensor, number) {
  const boxes = tensor.counts ? [chunkBox(tensor, number)] : tensor.pieces[number];
  const where = boxes.length === 1 ? `${placeText(boxes[0][0])} + ${placeText(boxes[0][1])}` : `${plural(boxes.length, "run")} from ${placeText(boxes[0][0])}`;
  return `chunk ${number}: ${where}\n${bytesText(chunkBytes(tensor, number))}, ${writerText(tensor.writers[number])}`;
}
function listChunks() {
  const tensor = state.selected, body = $("chunk-list").querySelector("tbody");
  body.replaceChildren();
  if (!tensor) return;
  const many = Math.min(tensor.count, MOST_CHUNKS_LISTED);
  const rows = document.createDocumentFragment();
  for (let number = 0; number < many; number++) {
    const boxes = tensor.counts ? [chunkBox(tensor, number)] : tensor.pieces[number];
    const row = document.createElement("tr");
    const first = boxes[0] || [[], []];
    for (const text of [number, placeText(first[0]), boxes.length > 1 ? `${plural(boxes.length, "run")} of a flattened range` : placeText(first[1]),
      bytesText(chunkBytes(tensor, number)), writerText(tensor.writers[number])]) {
      row.insertCell().textContent = text;
    }
    rows.append(row);
  }
  body.append(rows);
  $("chunk-list").querySelector("summary").textContent = tensor.count > many ? `List of chunks (the first ${many} of ${tensor.count.toLocaleString("en")})` : `List of chunks (${tensor.count})`;
}
function zoomBy(factor, x, y) {
  const box = $("grid").getBoundingClientRect();
  const px = (x ?? box.width / 2) - 58, py = (y ?? box.height / 2) - 30;
  const next = Math.min(2000, Math.max(1, view.zoom * factor));
  view.x = (view.x + px) * (next / view.zoom) - px;
  view.y = (view.y + py) * (next / view.zoom) - py;
  view.zoom = next;
  if (next === 1) { view.x = 0; view.y = 0; }
  drawGrid();
}

// The legend and the table of tensors.

function drawLegend() {
  const box = $("legend"), byDtype = $("colour").value === "dtype";
  box.replaceChildren();
  const head = document.createElement("b");
  const one = state.selected && document.body.classList.contains("single");
  head.textContent = byDtype ? "dtype" : "written by";
  box.append(head);
  const list = one ? [state.selected] : shown;
  const sums = new Map();
  for (const tensor of list) {
    if (byDtype) { sums.set(tensor.dtype, (sums.get(tensor.dtype) || 0) + tensor.bytes); continue; }
    const each = tensor.bytes / Math.max(1, tensor.writers.length);
    const even = tensor.counts !== null;
    tensor.writers.forEach((writer, number) => {
      const own = data.writers[writer];
      const size = even ? each : chunkBytes(tensor, number);
      for (const rank of own.length ? own : [-1]) sums.set(rank, (sums.get(rank) || 0) + size / Math.max(1, own.length));
    });
  }
  const entries = [...sums].sort((a, b) => byDtype ? b[1] - a[1] : a[0] - b[0]);
  for (const [name, size] of entries.slice(0, 128)) {
    const key = document.createElement("span");
    key.className = "key";
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = byDtype ? dtypeColours.get(name) : name === -1 ? "var(--unknown)" : rankColours.get(name);
    const text = byDtype ? name : name === -1 ? UNKNOWN : `rank ${name}`;
    const small = document.createElement("small");
    small.textContent = bytesText(Math.round(size));
    key.append(swatch, text, small);
    box.append(key);
  }
  if (entries.length > 128) box.append(`and ${entries.length - 128} more`);
  if (!byDtype && data.writers.some((own) => own.length > 1)) {
    const note = document.createElement("small");
    note.textContent = "Stripes: several ranks wrote parts of one chunk.";
    box.append(note);
  }
}
const ORDER = {
  key: (a, b) => a.key.localeCompare(b.key, "en", { numeric: true }), dtype: (a, b) => a.dtype < b.dtype ? -1 : a.dtype > b.dtype ? 1 : 0,
  bytes: (a, b) => a.bytes - b.bytes, count: (a, b) => a.count - b.count,
  shape: (a, b) => a.shape.length - b.shape.length || a.shape.reduce((d, n, i) => d || n - b.shape[i], 0),
};
const rowOf = new Map();
function drawTable() {
  const body = $("tensors").querySelector("tbody");
  const sign = state.up ? 1 : -1;
  const sorted = [...shown].sort((a, b) => sign * ORDER[state.sort](a, b) || ORDER.key(a, b));
  const rows = document.createDocumentFragment();
  rowOf.clear();
  for (const tensor of sorted.slice(0, state.rows)) {
    const row = document.createElement("tr");
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: tensor.key });
    button.addEventListener("click", () => select(tensor, { focus: true }));
    row.insertCell().append(button);
    for (const [text, number] of [[shapeText(tensor.shape)], [tensor.dtype], [bytesText(tensor.bytes), true],
      [tensor.count.toLocaleString("en"), true], [cutText(tensor)], [writersText(tensor)]]) {
      const cell = row.insertCell();
      cell.textContent = text;
      if (number) cell.className = "number";
    }
    rowOf.set(tensor, row);
    rows.append(row);
  }
  body.replaceChildren(rows);
  $("more").hidden = sorted.length <= state.rows;
  $("more").textContent = `Show more (${(sorted.length - state.rows).toLocaleString("en")} left)`;
  for (const button of $("tensors").querySelectorAll("[data-sort]")) {
    const own = button.dataset.sort === state.sort;
    button.parentElement.setAttribute("aria-sort", own ? (state.up ? "ascending" : "descending") : "none");
  }
  markRow();
}
function markRow() {
  for (const [tensor, row] of rowOf) row.classList.toggle("selected", tensor === state.selected);
}

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

// The first view of the page; its address may say what to show.

const chunks = tensors.reduce((sum, tensor) => sum + tensor.count, 0);
$("name").textContent = data.name;
$("facts").textContent = [data.backend, plural(tensors.length, "tensor"), bytesText(total), plural(chunks, "chunk"),
  ranks.length ? `written by ${plural(ranks.length, "rank")}` : UNKNOWN].join(" · ");
document.body.classList.toggle("single", tensors.length === 1);
const asked = new URLSearchParams(location.hash.slice(1));
if (asked.get("theme")) document.documentElement.dataset.theme = asked.get("theme");
if (asked.get("colour")) $("colour").value = asked.get("colour");
$("search").value = asked.get("q") || "";
search($("search").value);
if (asked.get("prefix")) zoomTo(partsOf(asked.get("prefix")));
const named = tensors.find((tensor) => tensor.key === asked.get("tensor"));
select(named || largest(shown.length ? shown : tensors));
document.documentElement.dataset.ready = "yes";
