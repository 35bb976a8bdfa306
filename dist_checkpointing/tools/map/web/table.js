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
