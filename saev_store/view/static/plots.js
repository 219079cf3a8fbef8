// Line plots with axes, in the colours of the page.
import uPlot from "./vendor/uPlot.esm.js";
import { element, extent, short } from "./dom.js";

const drawn = new Set();
// Lines that are named below a plot.
const MOST_NAMED = 6;
// Positions are whole numbers.
const STEPS = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// One or several lines over x; `lines` is a list of { label, values, strong }.
export function plot({ title, lines, x = lines[0].values.map((_, at) => at), xLabel, yLabel }) {
  const box = element("div", { class: "plot" });
  const ends = extent(lines.flatMap((line) => extent(line.values) ?? []));
  const range = ends ? `${yLabel}: from ${short(ends[0])} to ${short(ends[1])}.` : "No finite values.";
  const figure = element("figure", {}, element("figcaption", {}, title), box, element("p", { class: "hint" }, range));
  const axis = (label) => ({ label, stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } });
  const draw = () => {
    if (!figure.isConnected) return drawn.delete(draw);
    box.replaceChildren();
    const options = {
      width: Math.max(240, box.clientWidth),
      height: 220,
      scales: { x: { time: false }, y: { range: (_, low, high) => spread(low, high) } },
      axes: [{ ...axis(xLabel), incrs: STEPS }, { ...axis(yLabel), size: 64, values: (_, ticks) => ticks.map(short) }],
      legend: { show: lines.length > 1 && lines.length <= MOST_NAMED, live: false },
      series: [
        { label: xLabel },
        ...lines.map(({ label, strong }) => ({ label, stroke: colour(strong ? "--accent" : "--faint"), width: strong ? 2 : 1, dash: strong ? undefined : [5, 4], points: { show: x.length < 3 } })),
      ],
    };
    new uPlot(options, [x, ...lines.map((line) => line.values)], box);
    box.firstChild.setAttribute("role", "img");
    box.firstChild.setAttribute("aria-label", `${title}. ${range}`);
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

const again = () => drawn.forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
addEventListener("resize", again);
