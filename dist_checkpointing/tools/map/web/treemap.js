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
