// Line plots with axes, in the colours of the page.
import uPlot from "./vendor/uPlot.esm.js";
import { element, extent, short } from "./dom.js";

const drawn = new Set();
// Lines that are named below a plot, with their values under the pointer.
const MOST_NAMED = 6;
const STEPS = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// One or several lines over x; `lines` is a list of { label, values, strong }.
export function plot({ title, x, xLabel, yLabel, lines, height = 220 }) {
  const box = element("div", { class: "plot" });
  const ends = extent([].concat(...lines.map((line) => extent(line.values) ?? [])));
  const figure = element(
    "figure",
    {},
    element("figcaption", {}, title),
    box,
    element("p", { class: "hint" }, describe(ends, yLabel)),
  );
  const draw = () => {
    if (!figure.isConnected) return drawn.delete(draw);
    box.replaceChildren();
    const axis = (label) => ({ label, stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } });
    const series = lines.map((line) => ({
      label: line.label,
      stroke: colour(line.strong ? "--accent" : "--faint"),
      width: line.strong ? 2 : 1,
      dash: line.strong ? undefined : [5, 4],
      points: { show: x.length < 3 },
    }));
    new uPlot(
      {
        width: Math.max(240, box.clientWidth),
        height,
        scales: { x: { time: false }, y: { range: (_, low, high) => spread(low, high) } },
        // Positions are whole numbers.
        axes: [{ ...axis(xLabel), incrs: STEPS }, { ...axis(yLabel), size: 64, values: (_, ticks) => ticks.map(short) }],
        legend: { show: lines.length <= MOST_NAMED },
        series: [{ label: xLabel }, ...series],
      },
      [x, ...lines.map((line) => line.values)],
      box,
    );
    box.firstChild?.setAttribute("role", "img");
    box.firstChild?.setAttribute("aria-label", `${title}. ${describe(ends, yLabel)}`);
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

function describe(ends, what) {
  return ends ? `${what}: from ${short(ends[0])} to ${short(ends[1])}.` : "No finite values.";
}

const again = () => [...drawn].forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(again, 100);
});
