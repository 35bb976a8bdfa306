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
