// The view of layers: norms by token, dimensions that stand out, similarity between layers.
import { element, readableOn, scaled, section, table } from "./dom.js";
import { plot } from "./plots.js";
import { address, ask } from "./state.js";

export async function layersView({ query }) {
  const answer = await ask("layers", { layer: query.get("layer") });
  return [
    element("h1", {}, `Layers, and dimensions of layer ${answer.layer}`),
    norms(answer),
    dimensions(answer.dimensions, answer.layer),
    similarity(answer),
  ];
}

function norms({ stats, layers, layer, n_special: special }) {
  if (!stats) return section("Norms", element("p", {}, "One example is larger than what this page reads at once. Run `saev-store stats` first."));
  const over = `over ${stats.n_examples} examples${stats.is_sample ? ", a sample" : ""}`;
  const columns = ["mean_norm", "mean", "std", "min", "max", "zero_fraction", "nonfinite_fraction", "saturated_count"];
  const rows = layers.map((name, at) => [
    element("a", { href: address("layers", [], { layer: name }), "aria-current": name === layer ? "true" : null }, name),
    ...columns.map((column) => stats.per_layer[column][at]),
  ]);
  const lines = layers.map((name, at) => ({ label: `layer ${name}`, values: stats.norm_by_token[at], strong: name === layer }));
  lines.sort((a, b) => a.strong - b.strong);
  return section(
    "Norms",
    plot({
      title: `Mean L2 norm by token, ${over}; layer ${layer} is the solid line`,
      x: stats.tokens.map((token) => token - special),
      xLabel: special ? "content token (-1 is CLS)" : "content token",
      yLabel: "mean norm",
      lines,
    }),
    table(`Statistics of layers ${over}`, ["layer", ...columns.map((name) => name.replaceAll("_", " "))], rows),
  );
}

function dimensions(found, layer) {
  if (!found.n_vectors) return section("Dimensions", element("p", {}, "No vector of the sample is finite."));
  const rows = found.outliers.map(({ dimension, rms, ratio, mean }) => [`${dimension}`, rms, ratio, mean]);
  return section(
    "Dimensions",
    plot({
      title: `Root mean square of each dimension of layer ${layer}, over ${found.n_vectors} vectors`,
      x: found.rms.map((_, at) => at),
      xLabel: "dimension",
      yLabel: "root mean square",
      lines: [{ label: "rms", values: found.rms, strong: true }],
    }),
    element("p", {}, found.n_dead ? `Always 0 (${found.n_dead}): ${found.dead.join(", ")}${found.n_dead > found.dead.length ? ", …" : ""}.` : "None is always 0."),
    rows.length
      ? table(`Dimensions that stand out, over 6 times the median: ${found.n_outliers}`, ["dimension", "root mean square", "times the median", "mean"], rows)
      : element("p", {}, "None is over 6 times the median."),
  );
}

export function heat(caption, rowNames, columnNames, matrix) {
  const cell = (value) => {
    if (value === null) return element("td", {}, "–");
    const colour = scaled(value);
    return element("td", { class: "number heat", style: { "background-color": colour, color: readableOn(colour) } }, value.toFixed(2));
  };
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
    element(
      "table",
      { class: "heats" },
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, element("td", {}), columnNames.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, matrix.map((row, at) => element("tr", {}, element("th", { scope: "row" }, rowNames[at]), row.map(cell)))),
    ),
  );
}

function similarity({ similarity: found, layers }) {
  if (!found.matrix) return section("Similarity between layers", element("p", {}, `Not computed: ${found.why_not}.`));
  const caption = `Linear CKA over ${found.n_vectors} content tokens of ${found.n_examples} examples`;
  return section("Similarity between layers", heat(caption, layers, layers, found.matrix));
}
