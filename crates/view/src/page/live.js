// The parts of the page that change. The server sends those that differ from the ones that are here.
const connection = document.getElementById("connection");
function say(words) { connection.textContent = words; connection.hidden = !words; }
// What a person has done with a part: where it is scrolled to, what is open, and where the keyboard is.
function put(part, content) {
  const reach = ".plot, .scroll, summary";
  const places = [...part.querySelectorAll(".scroll")].map(s => [s.scrollLeft, s.scrollTop]);
  const open = [...part.querySelectorAll("details")].map(d => d.open);
  const focused = [...part.querySelectorAll(reach)].indexOf(document.activeElement);
  // Browsers tell of a focus that goes with its element, and then the cursor would leave.
  const cursors = [...at];
  part.innerHTML = content;
  cursors.forEach(([plot, step]) => at.set(plot, step));
  part.querySelectorAll(".scroll").forEach((s, i) => { if (places[i]) [s.scrollLeft, s.scrollTop] = places[i]; });
  part.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? d.open; });
  if (focused >= 0) part.querySelectorAll(reach)[focused]?.focus({ preventScroll: true });
  for (const plot of part.querySelectorAll(".plot")) if (at.has(key(plot))) place(plot, at.get(key(plot)));
}
const events = new EventSource("/events");
for (const part of document.querySelectorAll("main > section"))
  events.addEventListener(part.id, e => put(part, e.data));
events.onopen = () => say("");
events.onerror = () => say("The broker does not answer since " + new Date().toLocaleTimeString() +
  ". This page tries again, and shows what it last heard.");
// The server of this page may be another program than the broker.
events.addEventListener("silent", e => say("The broker does not answer since " +
  new Date(+e.data).toLocaleTimeString() + ". This page shows what it last heard."));
events.addEventListener("heard", () => say(""));
events.addEventListener("over", () => {
  events.close();
  say("The run is over. This page stays as it is; `fusionllm report` writes it to a file.");
});
