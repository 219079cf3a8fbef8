// The view of layers: norms by token, dimensions that stand out, similarity between layers.
import { element, readableOn, scaled, section, table } from "./dom.js";
import { plot } from "./plots.js";
import { address, ask } from "./state.js";

const COLUMNS = ["mean_norm", "mean", "std", "min", "max", "zero_fraction", "nonfinite_fraction"];

export async function layersView({ query }, store) {
  const answer = await ask("layers", { layer: query.get("layer") });
  return [
    element("h1", {}, `Layers, and dimensions of layer ${answer.layer}`),
    section("Norms", norms(answer, store.special)),
    section("Dimensions", dimensions(answer.dimensions, answer.layer)),
    similarity(answer.similarity, answer.layers, answer.layers),
  ];
}

function norms({ stats, layers, layer }, special) {
  if (!stats) return element("p", {}, "One example is larger than this page reads at once. Run `saev-store stats` first.");
  const over = `over ${stats.n_examples} examples${stats.is_sample ? ", a sample" : ""}`;
  const rows = layers.map((name, at) => [
    element("a", { href: address("layers", [], { layer: name }), "aria-current": name === layer ? "true" : null }, name),
    ...COLUMNS.map((column) => stats.per_layer[column][at]),
  ]);
  const lines = layers.map((name, at) => ({ label: `layer ${name}`, values: stats.norm_by_token[at], strong: name === layer }));
  return [
    plot({
      title: `Mean L2 norm by token, ${over}; layer ${layer} is the solid line`,
      x: stats.tokens.map((token) => token - special.length),
      xLabel: special.length ? `content token (-1 is ${special[0]})` : "content token",
      yLabel: "mean norm",
      lines: lines.sort((a, b) => a.strong - b.strong),
    }),
    table(`Statistics of layers ${over}`, ["layer", ...COLUMNS.map((name) => name.replaceAll("_", " "))], rows),
  ];
}

function dimensions(found, layer) {
  if (!found.n_vectors) return element("p", {}, "No vector of the sample is finite.");
  const rows = found.outliers.map(({ dimension, rms, ratio, mean }) => [`${dimension}`, rms, ratio, mean]);
  const dead = `Always 0 (${found.n_dead}): ${found.dead.join(", ")}${found.n_dead > found.dead.length ? ", …" : ""}.`;
  return [
    plot({
      title: `Root mean square of each dimension of layer ${layer}, over ${found.n_vectors} vectors`,
      xLabel: "dimension",
      yLabel: "root mean square",
      lines: [{ label: "rms", values: found.rms, strong: true }],
    }),
    element("p", {}, found.n_dead ? dead : "None is always 0."),
    rows.length
      ? table(`Dimensions that stand out, over 6 times the median: ${found.n_outliers}`, ["dimension", "root mean square", "times the median", "mean"], rows)
      : element("p", {}, "None is over 6 times the median."),
  ];
}

// A table of the similarity of each layer of one store to each of another.
export function similarity(found, rowNames, columnNames) {
  if (!found.matrix) return section("Similarity between layers", element("p", {}, `Not computed: ${found.why_not}.`));
  const cell = (value) => {
    if (value === null) return "–";
    const colour = scaled(value);
    return element("span", { class: "heat", style: { "background-color": colour, color: readableOn(colour) } }, value.toFixed(2));
  };
  const caption = `Linear CKA over ${found.n_vectors} content tokens of ${found.n_examples} examples`;
  return section("Similarity between layers", table(caption, ["layer", ...columnNames], found.matrix.map((row, at) => [rowNames[at], ...row.map(cell)])));
}
