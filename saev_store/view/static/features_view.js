// The views of a sparse autoencoder: all of its features, and one with the examples in which it is most active.
import { element, section, short, table } from "./dom.js";
import { plot } from "./plots.js";
import { address, ask, go } from "./state.js";
import { patch, tokenName, words } from "./token_view.js";

const percent = (share) => (share === null ? "not finite" : `${short(share * 100)} %`);

export async function featuresView({ query }) {
  const answer = await ask("features", { layer: query.get("layer") });
  const over = `over ${short(answer.n_vectors)} vectors of ${short(answer.n_examples)} examples`;
  const rows = answer.strongest.map((one) => [
    element("a", { href: address("feature", [one.feature], { layer: answer.layer }) }, `${one.feature}`),
    percent(one.share),
    one.mean,
    one.largest,
  ]);
  return [
    element("h1", {}, `Features of ${answer.name} on layer ${answer.layer}`),
    table(`Computed ${over}`, ["what", "value"], [
      ["architecture", answer.architecture],
      ["features", answer.n_features],
      ["never active here", answer.n_dead],
      ["active features of a token, on average", answer.n_active_per_token],
      ["variance explained", percent(answer.variance_explained)],
    ]),
    jump(answer),
    section(
      "How often features are active",
      plot({
        title: `Share of tokens on which a feature is active, ${over}`,
        x: answer.ranks,
        xLabel: "rank of the feature",
        yLabel: "share of tokens",
        lines: [{ label: "share", values: answer.shares, strong: true }],
      }),
    ),
    section("Strongest features", rows.length ? table("The largest mean activations", ["feature", "tokens", "mean activation", "largest"], rows) : element("p", {}, "None is active.")),
  ];
}

function jump({ n_features: n, layer }) {
  const input = element("input", { id: "feature", type: "text", inputmode: "numeric", autocomplete: "off", size: 8, "aria-describedby": "of-features" });
  const submit = (event) => {
    event.preventDefault();
    const feature = Number(input.value.trim());
    if (/^\d+$/.test(input.value.trim()) && feature < n) go("feature", [feature], { layer });
    else document.getElementById("status").textContent = `There is no feature ${input.value}; there are 0 to ${n - 1}.`;
  };
  return element("form", { on: { submit } }, element("label", { for: "feature" }, "Go to feature "), input, element("span", { id: "of-features" }, ` of ${short(n)}`));
}

let nFeatures = 0;

export async function featureView({ parts, query }) {
  const feature = Number(parts[0] || 0);
  const answer = await ask("feature", { feature, layer: query.get("layer") });
  nFeatures = answer.n_features;
  const hasPlaces = answer.picture || answer.found.some((one) => one.context);
  const rows = answer.found.map((one) => [
    element("a", { href: address("token", [one.example, one.token], { layer: answer.layer }) }, `example ${one.example}, token ${tokenName(answer, one.token)}`),
    one.activation,
    element("a", { href: address("example", [one.example], { layer: answer.layer, token: one.token, feature, colour: "feature" }) }, "on all tokens"),
    ...(hasPlaces ? [words(one.context) || patch(answer, one.example, one.token) || "–"] : []),
  ]);
  const caption = `Examples in which it is most active, one token of each, among ${short(answer.n_vectors)} vectors of ${short(answer.n_examples)} examples`;
  return [
    element("h1", {}, `Feature ${feature}, layer ${answer.layer}`),
    element("p", {}, element("a", { href: address("features", [], { layer: answer.layer }) }, "All features"), `. Active on ${percent(answer.share)} of the tokens, there ${short(answer.mean_when_active)} on average.`),
    section("Top examples", rows.length ? table(caption, ["token", "activation", "show", ...(hasPlaces ? ["where"] : [])], rows) : element("p", {}, `It is active nowhere among ${short(answer.n_vectors)} vectors.`)),
  ];
}

export function featureKeys(event, state) {
  const step = { n: 1, p: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") go("features", [], { layer: state.query.get("layer") });
  else if (step === undefined) return false;
  else {
    const to = Number(state.parts[0] || 0) + step;
    if (to >= 0 && to < nFeatures) go("feature", [to], { layer: state.query.get("layer") });
  }
  return true;
}
