// The view of one vector: its numbers, its nearest neighbours, and the same token in the other layers.
import { element, section, short, table, visible } from "./dom.js";
import { plot } from "./plots.js";
import { address, ask, go, kept } from "./state.js";

export async function tokenView({ parts, query }) {
  const [example, token] = parts.map(Number);
  const layer = query.get("layer");
  const answer = await ask("token", { example, token, layer });
  columns = answer.picture?.grid[1] ?? 1;
  return [
    element("h1", {}, `Token ${tokenName(answer, token)} of example ${example}, layer ${answer.layer}`),
    element("p", {}, element("a", { href: address("example", [example], { ...kept(query), layer: answer.layer, token }) }, `Example ${example}`),
      `. Norm ${short(answer.norm)}`, Object.entries(answer.token_arrays).map(([array, value]) => `, ${array} ${value}`).join(""), "."),
    place(answer, example, token),
    neighbours(answer),
    features(answer),
    vector(answer),
    layers(answer),
  ];
}

let columns = 1;

export function tokenName({ n_special: special }, token) {
  return token < special ? "CLS" : `${token - special}`;
}

export function words(context) {
  if (!context) return null;
  const shown = (tokens) => tokens.map((token) => visible(token, 24)).join(" ");
  return element("span", { class: "context" }, shown(context.before), " ", element("mark", {}, visible(context.token)), " ", shown(context.after));
}

// The image of an example with a frame around one patch; without the image the place in the grid.
export function patch(answer, example, token, isLarge = false) {
  const { picture } = answer;
  const content = token - answer.n_special;
  if (!picture || content < 0) return null;
  const [rows, across] = picture.grid;
  const [row, column] = [Math.floor(content / across), content % across];
  const [down, wide] = picture.covered;
  if (!picture.src || !picture.is_framed) return `row ${row}, column ${column}`;
  const percent = (share) => `${share * 100}%`;
  const box = element("span", {
    class: "box",
    style: { top: percent((row / rows) * down), left: percent((column / across) * wide), height: percent(down / rows), width: percent(wide / across) },
  });
  const alt = `The image of example ${example}; the patch is in row ${row}, column ${column}`;
  return element("span", { class: isLarge ? "crop large" : "crop" }, element("img", { src: `image/${example}`, alt, loading: "lazy" }), box);
}

function place(answer, example, token) {
  const [image, text] = [patch(answer, example, token, true), words(answer.context)];
  return image || text ? section("Where it is", element("p", {}, image, text)) : null;
}

function neighbours(answer) {
  const { found, n_compared: compared, n_examples: examples } = answer.neighbours;
  const caption = `The largest cosine similarities among ${short(compared)} vectors of ${short(examples)} examples`;
  if (!found.length) return section("Nearest neighbours", element("p", {}, "None: the vector is 0 or not finite, or nothing else was compared."));
  const hasLabels = found.some((one) => one.label !== null);
  const hasPlaces = answer.picture || found.some((one) => one.context);
  const head = ["token", "cosine similarity", "norm", ...(hasLabels ? ["label"] : []), ...(hasPlaces ? ["where"] : [])];
  const rows = found.map((one) => [
    element("a", { href: address("token", [one.example, one.token], { layer: answer.layer }) }, `example ${one.example}, token ${tokenName(answer, one.token)}`),
    one.similarity,
    one.norm,
    ...(hasLabels ? [one.label === null ? "–" : one.label] : []),
    ...(hasPlaces ? [words(one.context) || patch(answer, one.example, one.token) || "–"] : []),
  ]);
  return section("Nearest neighbours", table(caption, head, rows));
}

function vector(answer) {
  return section(
    "Vector",
    plot({
      title: `The ${answer.vector.length} numbers of the vector`,
      x: answer.vector.map((_, at) => at),
      xLabel: "dimension",
      yLabel: "value",
      lines: [{ label: "value", values: answer.vector, strong: true }],
    }),
    table("Largest magnitudes", ["dimension", "value"], answer.strongest.map(({ dimension, value }) => [`${dimension}`, value])),
  );
}

function features({ features: found, layer, example, token }) {
  if (!found) return null;
  const links = (one) => element("a", { href: address("feature", [one.feature], { layer }) }, `${one.feature}`);
  const shown = (one) => element("a", { href: address("example", [example], { layer, token, feature: one.feature, colour: "feature" }) }, "on all tokens");
  const rows = found.map((one) => [links(one), one.activation, shown(one)]);
  return section("Features", rows.length ? table("The largest activations on this token", ["feature", "activation", "show"], rows) : element("p", {}, "None is active on this token."));
}

function layers(answer) {
  if (answer.in_layers.length < 2) return null;
  const [, example, token] = [0, answer.example, answer.token];
  const rows = answer.in_layers.map((one) => [
    element("a", { href: address("token", [example, token], { layer: one.layer }), "aria-current": one.layer === answer.layer ? "true" : null }, one.layer),
    one.norm,
    one.similarity,
  ]);
  return section("The same token in other layers", table(`Cosine similarity to layer ${answer.layer}`, ["layer", "norm", "cosine similarity"], rows));
}

export function tokenKeys(event, state, store) {
  const [example, token] = state.parts.map(Number);
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [0, -columns], ArrowDown: [0, columns], n: [1, 0], p: [-1, 0] };
  if (event.key === "Escape") {
    go("example", [example], { ...kept(state.query), token });
    return true;
  }
  const step = steps[event.key];
  if (!step) return false;
  const [to, at] = [example + step[0], token + step[1]];
  if (to >= 0 && to < store.n_examples && at >= 0 && at < store.n_tokens) go("token", [to, at], kept(state.query));
  return true;
}
