// The view of one example: its tokens in a grid over its image, as a text, or as a list; with norms, components and labels.
import { categorical, colourBar, element, extent, readableOn, scaled, section, short, swatch, visible } from "./dom.js";
import { address, amend, ask, go, kept } from "./state.js";

const GREY = "#808080";
const [YES, NO] = ["#f0e442", "#333333"];
// Different values of a token array that are named beside their colours.
const MOST_NAMED = 12;

export async function exampleView({ parts, query }, store) {
  const example = Number(parts[0] || 0);
  const layer = query.get("layer");
  const answer = await ask("example", { example, layer, first: query.get("first"), token: query.get("token"), feature: query.get("feature") });
  const shown = new Tokens(answer, store, query);
  const last = answer.first + answer.norms.length;
  const pages = [];
  if (answer.first > 0) pages.push(element("a", { href: address("example", [example], { ...kept(query), first: Math.max(0, answer.first - answer.n_page) }) }, "Tokens before"));
  if (last < answer.n_tokens) pages.push(element("a", { href: address("example", [example], { ...kept(query), first: last }) }, "Tokens after"));
  return [
    element("h1", {}, `Example ${example}, layer ${answer.layer}`),
    ...answer.notes.map((note) => element("p", { class: "warning" }, note)),
    section("Tokens", shown.controls(), shown.grid, element("p", { class: "pages" }, pages), shown.details),
  ];
}

export class Tokens {
  constructor(answer, store, query) {
    Object.assign(this, { answer, store, query });
    this.columns = answer.picture ? answer.picture.grid[1] : null;
    this.mode = query.get("colour") || (answer.colours.length ? "components" : "norm");
    this.details = element("div", { class: "details", "aria-live": "polite" });
    const overlay = Number(query.get("overlay") ?? 60);
    this.overlay = overlay >= 0 && overlay <= 100 ? overlay : 60;
    [this.least, this.most] = extent(answer.norms) ?? [null, null];
    this.activations = answer.feature?.activations ?? [];
    this.strongest = extent([0, ...this.activations])[1];
    this.legend = element("p", { class: "hint" });
    this.cells = answer.norms.map((_, at) => this.cell(at));
    this.grid = this.arranged();
    this.paint();
    const token = Number(query.get("token"));
    this.select(Math.max(0, Math.min(this.cells.length - 1, (Number.isInteger(token) ? token : 0) - answer.first)), false);
  }

  name(at) {
    const content = this.answer.first + at - this.answer.n_special;
    return content < 0 ? "CLS" : `${content}`;
  }

  cell(at) {
    const text = this.text(at);
    const isHidden = this.value("mask", at) === false;
    return element(
      "button",
      {
        type: "button",
        class: `token${isHidden ? " masked" : ""}`,
        tabindex: -1,
        "aria-label": `token ${this.name(at)}${text === null ? "" : `, ${visible(text)}`}, norm ${short(this.answer.norms[at])}`,
        on: { click: () => this.open(at), focus: () => this.select(at, false) },
      },
      text === null ? (this.columns && this.answer.picture.src && this.answer.picture.is_framed && this.name(at) !== "CLS" ? "" : this.name(at)) : visible(text),
    );
  }

  text(at) {
    const content = this.answer.first + at - this.answer.n_special;
    if (!this.answer.texts) return null;
    if (content < 0) return "CLS";
    return this.answer.texts[at - Math.max(0, this.answer.n_special - this.answer.first)] ?? null;
  }

  value(array, at) {
    const content = at - Math.max(0, this.answer.n_special - this.answer.first);
    return content < 0 ? undefined : this.answer.token_arrays[array]?.[content];
  }

  arranged() {
    const group = { role: "group", "aria-label": "Tokens; arrow keys move, Enter opens", on: { keydown: (event) => this.key(event) } };
    const { picture, n_special: special, first } = this.answer;
    if (!picture) return element("div", { ...group, class: this.answer.texts ? "text" : "list" }, this.cells);
    const before = Math.max(0, special - first);
    const cells = element("div", { class: "patches", style: { "grid-template-columns": `repeat(${this.columns}, 1fr)` } }, this.cells.slice(before));
    const frame = element("div", { class: "picture", style: { "aspect-ratio": `${picture.image_px[1]} / ${picture.image_px[0]}` } });
    if (picture.src && picture.is_framed) {
      frame.append(element("img", { src: picture.src, alt: `The image of example ${this.answer.example}, as the model saw it` }));
      cells.classList.add("over");
      cells.style.setProperty("height", `${picture.covered[0] * 100}%`);
      cells.style.setProperty("width", `${picture.covered[1] * 100}%`);
    }
    frame.append(cells);
    const beside = picture.src && !picture.is_framed
      ? element("figure", {}, element("img", { src: picture.src, class: "whole", alt: `The image of example ${this.answer.example}` }),
          element("figcaption", {}, "The whole image. The metadata do not say how it was resized and cropped, so tokens are not drawn over it."))
      : null;
    const note = picture.src ? null : element("p", { class: "hint" }, `No image: ${picture.why_not}`);
    return element("div", { ...group, class: "image" }, element("div", { class: "special" }, this.cells.slice(0, before)), frame, beside, note);
  }

  controls() {
    const modes = [["components", "principal components (RGB)"], ["norm", "norm"], ...Object.keys(this.answer.token_arrays).map((name) => [name, name]), ["none", "nothing"]];
    if (!this.answer.colours.length) modes.shift();
    if (this.answer.feature) modes.unshift(["feature", `feature ${this.answer.feature.feature}`]);
    const select = element("select", { id: "colour", on: { change: (event) => this.recolour(event.target.value) } },
      modes.map(([value, text]) => element("option", { value, selected: value === this.mode }, text)));
    const parts = [element("label", { for: "colour" }, "Colour by "), select];
    if (this.answer.picture?.src && this.answer.picture.is_framed) {
      const range = element("input", { id: "overlay", type: "range", min: 0, max: 100, value: this.overlay, on: { input: (event) => { this.overlay = Number(event.target.value); this.choose({ overlay: this.overlay }); } } });
      parts.push(element("label", { for: "overlay" }, " Overlay "), range);
    }
    return element("div", { class: "controls" }, parts, this.legend);
  }

  // What the colours mean.
  meaning() {
    const { feature, variance_shares: shares, norms } = this.answer;
    const lost = norms.filter((norm) => norm === null).length;
    const grey = lost ? swatch(GREY, `${short(lost)} of ${short(norms.length)} tokens are not finite`) : null;
    if (this.mode === "none") return [];
    if (this.mode === "norm") return this.least === null ? [grey] : ["L2 norm: ", colourBar(this.least, this.most), grey];
    if (this.mode === "feature" && feature) return [`Activation of feature ${feature.feature}: `, colourBar(0, this.strongest)];
    if (this.mode === "components") {
      const percent = (at) => (at < shares.length ? `${Math.round(shares[at] * 100)} %` : "none");
      return ["Principal components, by their share of the variance of the sample: ",
        ["#e00000", "#00a000", "#3050ff"].map((colour, at) => swatch(colour, `${at + 1}: ${percent(at)}`)), grey];
    }
    const values = [...new Set(this.cells.map((_, at) => this.value(this.mode, at)).filter((value) => value !== undefined))];
    if (!values.length) return [];
    if (typeof values[0] === "boolean") return [swatch(YES, `${this.mode} true`), swatch(NO, `${this.mode} false`)];
    values.sort((one, other) => one - other);
    if (values.length > MOST_NAMED) return [`${this.mode}: ${short(values.length)} values from ${short(values[0])} to ${short(values.at(-1))}; neighbouring values differ in colour.`];
    return [`${this.mode}: `, values.map((value) => swatch(this.colourOf(value), short(value)))];
  }

  recolour(mode) {
    this.mode = mode;
    this.choose({ colour: mode });
  }

  // Draws again with another choice, and keeps it in the address and on the way to a token.
  choose(choice) {
    this.chosen = { ...this.chosen, ...choice };
    amend(choice);
    this.paint();
    this.select(this.at, false);
  }

  colour(at) {
    const norm = this.answer.norms[at];
    if (this.mode === "none") return null;
    if (this.mode === "components") return this.answer.colours[at] ?? GREY;
    if (this.mode === "feature" && this.answer.feature) return scaled(this.strongest > 0 ? this.activations[at] / this.strongest : 0);
    if (this.mode === "norm") return norm === null ? GREY : scaled(this.most > this.least ? (norm - this.least) / (this.most - this.least) : 0.5);
    return this.colourOf(this.value(this.mode, at));
  }

  colourOf(value) {
    if (typeof value === "number") return categorical(Math.abs(Math.round(value)));
    return value === undefined || value === null ? GREY : value ? YES : NO;
  }

  paint() {
    this.legend.replaceChildren(...this.meaning().flat().filter(Boolean));
    const isOver = this.answer.picture?.src && this.answer.picture.is_framed;
    this.cells.forEach((cell, at) => {
      const colour = this.colour(at);
      const isPatch = isOver && !cell.textContent;
      const alpha = isPatch ? Math.round((this.overlay / 100) * 255).toString(16).padStart(2, "0") : "";
      cell.style.setProperty("background-color", colour === null ? "transparent" : colour + alpha);
      if (colour === null) cell.style.removeProperty("color");
      else cell.style.setProperty("color", readableOn(colour));
    });
  }

  select(at, focus = true) {
    const had = this.cells[this.at];
    had?.setAttribute("tabindex", "-1");
    had?.classList.remove("chosen");
    this.at = at;
    const cell = this.cells[at];
    cell.setAttribute("tabindex", "0");
    cell.classList.add("chosen");
    if (focus) cell.focus();
    const token = this.answer.first + at;
    if (this.grid?.isConnected) amend({ token });
    const arrays = Object.keys(this.answer.token_arrays).map((name) => [name, this.value(name, at)]).filter(([, value]) => value !== undefined);
    const text = this.text(at);
    this.details.replaceChildren(
      element("p", {},
        element("strong", {}, `Token ${this.name(at)}`), text === null ? "" : element("span", { class: "context" }, ` “${visible(text, 400)}”`), `: norm ${short(this.answer.norms[at])}`,
        this.answer.feature ? `, feature ${this.answer.feature.feature} ${short(this.activations[at])}` : "",
        ...arrays.map(([name, value]) => `, ${name} ${value}`), ". ",
        element("a", { href: this.addressOf(at) }, "Vector and neighbours")),
    );
  }

  addressOf(at) {
    return address("token", [this.answer.example, this.answer.first + at], { ...kept(this.query), ...this.chosen, layer: this.answer.layer });
  }

  open(at) {
    location.hash = this.addressOf(at);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -(this.columns || this.rowLength()), ArrowDown: this.columns || this.rowLength() }[event.key];
    if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const to = this.at + step;
    if (to >= 0 && to < this.cells.length) this.select(to);
  }

  // How many cells are in a row of a list that wraps.
  rowLength() {
    const top = this.cells[0].offsetTop;
    const next = this.cells.findIndex((cell) => cell.offsetTop > top);
    return next > 0 ? next : 1;
  }
}

export function exampleKeys(event, state, store) {
  const example = Number(state.parts[0] || 0);
  const step = { n: 1, p: -1 }[event.key];
  if (step !== undefined) {
    const to = example + step;
    if (to >= 0 && to < store.n_examples) go("example", [to], kept(state.query));
    return true;
  }
  if (event.key.startsWith("Arrow")) {
    document.querySelector(".token.chosen")?.focus();
    document.querySelector(".token.chosen")?.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, bubbles: true }));
    return true;
  }
  return false;
}
