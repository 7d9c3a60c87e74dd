// The cursor of the charts, by mouse, finger and keyboard. Events are caught above the charts, which come and go.
"use strict";
// The step at which each plot has its cursor. It is infinity for the newest step, so that the cursor stays at the
// newest one.
const at = new Map();
function range(plot) { return [+plot.dataset.from, +plot.dataset.to]; }
function place(plot, wanted) {
  const [from, to] = range(plot);
  const series = JSON.parse(plot.dataset.series);
  wanted = Math.min(to, Math.max(from, wanted));
  let step = null, newest = from;
  for (const [, steps] of series) for (const s of steps) {
    if (step === null || Math.abs(s - wanted) < Math.abs(step - wanted)) step = s;
    newest = Math.max(newest, s);
  }
  if (step === null) return;
  const lines = ["step " + step];
  for (const [name, steps, values] of series) {
    // The newest value up to this step: a curve of few points holds until the next one.
    let i = -1;
    while (i + 1 < steps.length && steps[i + 1] <= step) i++;
    if (i >= 0) lines.push(name + "  " + values[i]);
  }
  const where = (step - from) / (to - from);
  const cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  cursor.style.left = tip.style.left = 100 * where + "%";
  tip.style.transform = where > 0.5 ? "translateX(calc(-100% - 10px))" : "translateX(10px)";
  tip.textContent = lines.join("\n");
  cursor.hidden = tip.hidden = false;
  at.set(key(plot), step === newest ? Infinity : step);
}
function key(plot) { return [...document.querySelectorAll(".plot")].indexOf(plot); }
function leave(plot) {
  at.delete(key(plot));
  plot.querySelector(".cursor").hidden = plot.querySelector(".tip").hidden = true;
}
addEventListener("pointermove", e => {
  for (const plot of document.querySelectorAll(".plot")) {
    const box = plot.getBoundingClientRect(), [from, to] = range(plot);
    if (plot.contains(e.target)) place(plot, from + (to - from) * (e.clientX - box.left) / box.width);
    else if (plot !== document.activeElement && at.has(key(plot))) leave(plot);
  }
});
addEventListener("focusin", e => {
  if (e.target.matches(".plot")) place(e.target, at.get(key(e.target)) ?? Infinity);
});
addEventListener("focusout", e => { if (e.target.matches(".plot")) leave(e.target); });
addEventListener("keydown", e => {
  if (!e.target.matches || !e.target.matches(".plot")) return;
  const move = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1, Home: -1, End: 1 }[e.key];
  if (move === undefined) return;
  e.preventDefault();
  const [from, to] = range(e.target), before = at.get(key(e.target)) ?? Infinity;
  let wanted = Math.min(to, before);
  // Where points are far apart, a key goes on to the next one.
  do place(e.target, wanted += move * (to - from));
  while (at.get(key(e.target)) === before && from <= wanted && wanted <= to);
});
