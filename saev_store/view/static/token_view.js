// The view of one vector: its numbers, its nearest neighbours, and the same token in the other layers.
import { element, section, short, table, tokenName, visible } from "./dom.js";
import { plot } from "./plots.js";
import { address, ask, go, kept, tokenAddress } from "./state.js";

let columns = 1;

export async function tokenView({ parts, query }, store) {
  const example = Number(parts[0]);
  const token = Number(parts[1]) + store.special.length;
  const answer = await ask("token", { example, token, layer: query.get("layer") });
  columns = answer.picture?.grid[1] ?? 1;
  const places = [patch(answer, example, token, true), words(answer.context)].filter(Boolean);
  return [
    element("h1", {}, `Token ${tokenName(answer, token)} of example ${example}, layer ${answer.layer}`),
    element("p", {}, element("a", { href: address("example", [example], { ...kept(), layer: answer.layer, token: parts[1] }) }, `Example ${example}`),
      `. Norm ${short(answer.norm)}`, Object.entries(answer.token_arrays).map(([array, value]) => `, ${array} ${value}`).join(""), "."),
    places.length ? section("Where it is", element("p", {}, places)) : null,
    section("Nearest neighbours", neighbours(answer)),
    section(
      "Vector",
      plot({ title: `The ${answer.vector.length} numbers of the vector`, xLabel: "dimension", yLabel: "value", lines: [{ label: "value", values: answer.vector, strong: true }] }),
      table("Largest magnitudes", ["dimension", "value"], answer.strongest.map(({ dimension, value }) => [`${dimension}`, value])),
    ),
    layers(answer),
  ];
}

function words(context) {
  if (!context) return null;
  const shown = (tokens) => tokens.map((token) => visible(token, 24)).join(" ");
  return element("span", { class: "context" }, shown(context.before), " ", element("mark", {}, visible(context.token)), " ", shown(context.after));
}

// The image of an example with a frame around one patch; without the image the place in the grid.
function patch({ picture, special }, example, token, isLarge = false) {
  const content = token - special.length;
  if (!picture || content < 0) return null;
  const [rows, across] = picture.grid;
  const [row, column] = [Math.floor(content / across), content % across];
  if (!picture.src || !picture.is_framed) return `row ${row}, column ${column}`;
  const [down, wide] = picture.covered;
  const percent = (share) => `${share * 100}%`;
  const box = element("span", {
    class: "box",
    style: { top: percent((row / rows) * down), left: percent((column / across) * wide), height: percent(down / rows), width: percent(wide / across) },
  });
  const alt = `The image of example ${example}; the patch is in row ${row}, column ${column}`;
  return element("span", { class: isLarge ? "crop large" : "crop" }, element("img", { src: `image/${example}`, alt, loading: "lazy" }), box);
}

function neighbours(answer) {
  const { found, n_compared: compared, n_examples: examples } = answer.neighbours;
  if (!found.length) return element("p", {}, "None: the vector is 0 or not finite, or nothing else was compared.");
  const hasLabels = found.some((one) => one.label !== null);
  const hasPlaces = answer.picture || found.some((one) => one.context);
  const rows = found.map((one) => [
    element("a", { href: tokenAddress(answer, one.example, one.token, { layer: answer.layer }) }, `example ${one.example}, token ${tokenName(answer, one.token)}`),
    one.similarity,
    one.norm,
    ...(hasLabels ? [one.label ?? "–"] : []),
    ...(hasPlaces ? [words(one.context) || patch(answer, one.example, one.token) || "–"] : []),
  ]);
  const head = ["token", "cosine similarity", "norm", ...(hasLabels ? ["label"] : []), ...(hasPlaces ? ["where"] : [])];
  return table(`The largest cosine similarities among ${short(compared)} vectors of ${short(examples)} examples`, head, rows);
}

function layers(answer) {
  const { in_layers: found, example, token, layer } = answer;
  if (found.length < 2) return null;
  const rows = found.map((one) => [
    element("a", { href: tokenAddress(answer, example, token, { layer: one.layer }), "aria-current": one.layer === layer ? "true" : null }, one.layer),
    one.norm,
    one.similarity,
  ]);
  return section("The same token in other layers", table(`Cosine similarity to layer ${layer}`, ["layer", "norm", "cosine similarity"], rows));
}

export function tokenKeys(event, state, store) {
  const [example, token] = state.parts.map(Number);
  if (event.key === "Escape") {
    go("example", [example], { ...kept(), token });
    return true;
  }
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [0, -columns], ArrowDown: [0, columns], n: [1, 0], p: [-1, 0] }[event.key];
  if (!step) return false;
  const [to, at] = [example + step[0], token + step[1]];
  if (to >= 0 && to < store.n_examples && at >= -store.special.length && at < store.n_tokens - store.special.length) go("token", [to, at], kept());
  return true;
}
