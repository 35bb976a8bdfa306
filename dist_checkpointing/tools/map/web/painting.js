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
