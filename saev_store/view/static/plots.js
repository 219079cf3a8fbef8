// Line plots with axes, in the colours of the page.
import uPlot from "./vendor/uPlot.esm.js";
import { element } from "./dom.js";

const drawn = new Set();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// One or several lines over x; `lines` is a list of { label, values, strong }.
export function plot({ title, x, xLabel, yLabel, lines, height = 220 }) {
  const box = element("div", { class: "plot" });
  const values = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const figure = element(
    "figure",
    {},
    element("figcaption", {}, title),
    box,
    element("p", { class: "hint" }, describe(values, yLabel)),
  );
  const draw = () => {
    if (!figure.isConnected) return drawn.delete(draw);
    box.replaceChildren();
    const axis = (label) => ({ label, stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } });
    const series = lines.map((line) => ({
      label: line.label,
      stroke: colour(line.strong ? "--accent" : "--faint"),
      width: line.strong ? 2 : 1,
      points: { show: x.length < 3 },
    }));
    new uPlot(
      {
        width: Math.max(240, box.clientWidth),
        height,
        scales: { x: { time: false }, y: { range: (_, low, high) => spread(low, high) } },
        axes: [axis(xLabel), { ...axis(yLabel), size: 64 }],
        legend: { show: lines.length === 1 },
        series: [{ label: xLabel }, ...series],
      },
      [x, ...lines.map((line) => line.values)],
      box,
    );
    box.firstChild?.setAttribute("role", "img");
    box.firstChild?.setAttribute("aria-label", `${title}. ${describe(values, yLabel)}`);
  };
  drawn.add(draw);
  requestAnimationFrame(draw);
  return figure;
}

// The ends of an axis. Numbers that differ by rounding alone get one that is wide enough to have ticks.
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const middle = (low + high) / 2;
  const half = Math.max((high - low) * 0.55, Math.abs(middle) * 1e-3, 1e-30);
  return [middle - half, middle + half];
}

function describe(values, what) {
  if (!values.length) return "No finite values.";
  const show = (value) => Number(value.toPrecision(4));
  return `${what}: from ${show(Math.min(...values))} to ${show(Math.max(...values))}.`;
}

const again = () => [...drawn].forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(again, 100);
});
