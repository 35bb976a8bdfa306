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
