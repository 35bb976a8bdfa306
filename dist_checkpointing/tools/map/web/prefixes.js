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
