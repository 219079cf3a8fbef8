// The view of a whole store: card, problems, shards, provenance.
import { element, problemList, section, short, table } from "./dom.js";
import { ask } from "./state.js";

export async function storeView() {
  const answer = await ask("store");
  const parts = [element("h1", {}, `Store ${answer.name}`)];
  if (!answer.is_open) parts.push(element("p", { class: "error" }, `This store does not open. ${answer.remedy || ""}`));
  if (answer.card.length) parts.push(card(answer.card));
  parts.push(section("Problems", problemList(answer.problems)));
  if (answer.n_problems > answer.problems.length) parts.push(element("p", {}, `… and ${answer.n_problems - answer.problems.length} more.`));
  if (answer.is_open) parts.push(strip(answer.shards, answer.n_examples), provenance(answer.provenance), reading(answer.reading));
  return parts;
}

function card(rows) {
  return element(
    "dl",
    { class: "card" },
    rows.filter(([name]) => name).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]),
  );
}

const MARKS = { whole: "·", short: "◐", missing: "✕" };

function strip({ n, examples_per_shard: size, cells, n_damaged: damaged }, nExamples) {
  const range = ({ first, last }) => (first === last ? `shard ${first}` : `shards ${first} to ${last}`);
  const marks = cells.map((cell) =>
    element("span", { class: `shard ${cell.state}`, title: `${range(cell)}: ${cell.state}`, "aria-hidden": true }, MARKS[cell.state]),
  );
  const wrong = cells.filter((cell) => cell.state !== "whole");
  return section(
    "Shards",
    element("p", {}, `${short(n)} of ${short(size)} examples each; ${damaged ? `${short(damaged)} damaged` : "none known to be damaged"}.`),
    element("div", { class: "strip", role: "img", "aria-label": `${n} shards, ${damaged} damaged` }, marks),
    element("p", { class: "hint" }, "· whole, ◐ short, ✕ missing or lost"),
    wrong.length
      ? table("Damaged shards", ["shards", "state", "examples"], wrong.map((cell) => [range(cell), cell.state, `${cell.first * size} to ${Math.min((cell.last + 1) * size, nExamples) - 1}`]))
      : null,
  );
}

function provenance({ dataset, source }) {
  const rows = Object.entries(source || {}).map(([name, value]) => [name, typeof value === "boolean" ? String(value) : value]);
  if (dataset) rows.unshift(["dataset", dataset]);
  return section("Recorded from", rows.length ? table("Data set", ["what", "value"], rows) : element("p", {}, "The metadata name no data set."));
}

function reading(how) {
  const digests = how.has_digests === null ? "not known" : how.has_digests ? "there; saev-store validate --deep compares them" : "none";
  return section(
    "How it is read",
    table("Reading", ["what", "value"], [
      ["through", how.engine],
      ["sizes of files compared", how.sizes_compared ? "when the store was opened" : "when a file is first read"],
      ["digests", digests],
      ["sample for neighbours, components and similarities", `at most ${how.most_examples} examples`],
    ]),
  );
}
