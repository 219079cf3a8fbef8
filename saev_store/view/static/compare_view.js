// The view of two stores: one example in both, and the similarity of their layers.
import { element, section } from "./dom.js";
import { similarity } from "./layers_view.js";
import { plot } from "./plots.js";
import { address, ask, go } from "./state.js";

export async function compareView({ parts, query }, store) {
  const example = Number(parts[0] || 0);
  const answer = await ask("compare", { example, layer: query.get("layer"), layer_b: query.get("layer_b") });
  const title = element("h1", {}, `Compared with ${answer.names[1].slice(0, 12)}`);
  if (answer.why_not) return [title, element("p", { class: "warning" }, answer.why_not)];
  const [a, b] = answer.layers;
  const choose = element("select", { id: "other-layer", on: { change: (event) => go("compare", [example], { layer: a, layer_b: event.target.value }) } },
    answer.layers_b.map((name) => element("option", { value: name, selected: name === b }, name)));
  const [first, second] = answer.norms;
  return [
    title,
    element("p", {}, element("label", { for: "other-layer" }, "Layer of the other store "), choose, " ",
      element("a", { href: address("example", [example], { layer: a }) }, `Example ${example}`)),
    section(
      `Example ${example}: layer ${a}, and layer ${b} of the other`,
      plot({
        title: "L2 norms by content token; the solid line is the first store",
        xLabel: "content token",
        yLabel: "norm",
        lines: [{ label: "other", values: second }, { label: "first", values: first, strong: true }],
      }),
      answer.cosine
        ? plot({ title: "Cosine similarity by content token", xLabel: "content token", yLabel: "cosine similarity", lines: [{ label: "cosine", values: answer.cosine, strong: true }] })
        : element("p", {}, "The vectors have different lengths, so they have no cosine similarity."),
    ),
    similarity(answer.similarity, store.layers, answer.layers_b),
  ];
}

export function compareKeys(event, state, store) {
  const to = Number(state.parts[0] || 0) + ({ n: 1, p: -1 }[event.key] ?? NaN);
  if (Number.isNaN(to)) return false;
  if (to >= 0 && to < store.n_examples) go("compare", [to], Object.fromEntries(state.query));
  return true;
}
