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
