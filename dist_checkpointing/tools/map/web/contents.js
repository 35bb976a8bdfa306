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
