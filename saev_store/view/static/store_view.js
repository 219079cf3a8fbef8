// The view of a whole store: card, problems, shards, provenance.
import { element, section, short, table } from "./dom.js";
import { ask } from "./state.js";

const MARKS = { whole: "·", short: "◐", missing: "✕" };

export async function storeView() {
  const answer = await ask("store");
  return [
    element("h1", {}, `Store ${answer.name}`),
    element("dl", { class: "card" }, answer.card.filter(([name]) => name).map(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])),
    section("Problems", problems(answer)),
    shards(answer.shards, answer.n_examples),
    section("Recorded from", answer.source.length ? table("Data set", ["what", "value"], answer.source) : element("p", {}, "The metadata name no data set.")),
    section("How it is read", table("Reading", ["what", "value"], [
      ["through", answer.engine],
      ["digests", answer.digests],
      ["sample for neighbours, components and similarities", `at most ${answer.most_examples} examples`],
    ])),
  ];
}

function problems({ problems: found, n_problems: n }) {
  if (!n) return element("p", {}, "None known.");
  const lost = ([first, end]) => (end - first > 1 ? `${first} to ${end - 1}` : `${first}`);
  const items = found.map((problem) =>
    element("li", { class: problem.severity },
      element("strong", {}, problem.severity), ` ${problem.kind} `, element("code", {}, problem.where), element("p", {}, problem.message),
      problem.lost.length ? element("p", {}, `Lost examples: ${problem.lost.map(lost).join(", ")}`) : null),
  );
  return [element("ul", { class: "problems" }, items), n > found.length ? element("p", {}, `… and ${n - found.length} more.`) : null];
}

function shards({ n, examples_per_shard: size, cells, n_damaged: damaged }, nExamples) {
  const range = ({ first, last }) => (first === last ? `shard ${first}` : `shards ${first} to ${last}`);
  const marks = cells.map((cell) => element("span", { class: `shard ${cell.state}`, title: `${range(cell)}: ${cell.state}`, "aria-hidden": true }, MARKS[cell.state]));
  const rows = cells
    .filter((cell) => cell.state !== "whole")
    .map((cell) => [range(cell), cell.state, `${cell.first * size} to ${Math.min((cell.last + 1) * size, nExamples) - 1}`]);
  return section(
    "Shards",
    element("p", {}, `${short(n)} of ${short(size)} examples each; ${damaged ? `${short(damaged)} damaged` : "none known to be damaged"}.`),
    element("div", { class: "strip", role: "img", "aria-label": `${n} shards, ${damaged} damaged` }, marks),
    element("p", { class: "hint" }, "· whole, ◐ short, ✕ missing or lost"),
    rows.length ? table("Damaged shards", ["shards", "state", "examples"], rows) : null,
  );
}
