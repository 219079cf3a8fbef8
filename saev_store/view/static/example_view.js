// The view of one example: its tokens in a grid over its image, as a text, or as a list; with norms, components and labels.
import { categorical, colourBar, element, extent, readableOn, scaled, section, short, swatch, tokenName, visible } from "./dom.js";
import { address, amend, ask, go, kept, tokenAddress } from "./state.js";

const GREY = "#808080";
const [YES, NO] = ["#f0e442", "#333333"];
// Different values of a token array that are named next to their colours.
const MOST_NAMED = 12;

export async function exampleView({ parts, query }, store) {
  const example = Number(parts[0] || 0);
  const token = query.has("token") ? Number(query.get("token")) + store.special.length : null;
  const answer = await ask("example", { example, layer: query.get("layer"), first: query.get("first"), token });
  const [first, last] = [answer.first, answer.first + answer.norms.length];
  const page = (from, text) => element("a", { href: address("example", [example], { ...kept(), first: from }) }, text);
  const pages = [first > 0 ? page(Math.max(0, first - answer.n_page), "Tokens before") : null, last < answer.n_tokens ? page(last, "Tokens after") : null];
  const tokens = new Tokens(answer, query, token ?? answer.first);
  return [
    element("h1", {}, `Example ${example}, layer ${answer.layer}`),
    ...answer.notes.map((note) => element("p", { class: "warning" }, note)),
    section("Tokens", tokens.controls(), tokens.grid, element("p", { class: "pages" }, pages), tokens.details),
  ];
}

class Tokens {
  constructor(answer, query, token) {
    this.answer = answer;
    // Content tokens of this page begin at this cell.
    this.nBefore = Math.max(0, answer.special.length - answer.first);
    this.columns = answer.picture?.grid[1];
    this.isOver = Boolean(answer.picture?.src && answer.picture.is_framed);
    this.mode = query.get("colour") || "components";
    this.overlay = Math.min(100, Math.max(0, Number(query.get("overlay") ?? 60) || 0));
    [this.least, this.most] = extent(answer.norms) ?? [null, null];
    this.details = element("div", { class: "details", "aria-live": "polite" });
    this.legend = element("p", { class: "hint" });
    this.cells = answer.norms.map((_, at) => this.cell(at));
    this.grid = this.arranged();
    this.paint();
    this.select(Math.max(0, Math.min(this.cells.length - 1, token - answer.first)) || 0, false);
  }

  name(at) {
    return tokenName(this.answer, this.answer.first + at);
  }

  text(at) {
    return at < this.nBefore ? null : (this.answer.texts?.[at - this.nBefore] ?? null);
  }

  value(array, at) {
    return at < this.nBefore ? undefined : this.answer.token_arrays[array]?.[at - this.nBefore];
  }

  cell(at) {
    const text = this.text(at);
    const isMasked = this.value("mask", at) === false;
    const label = `token ${this.name(at)}${text === null ? "" : `, ${visible(text)}`}, norm ${short(this.answer.norms[at])}`;
    return element(
      "button",
      {
        type: "button",
        class: `token${isMasked ? " masked" : ""}`,
        hidden: isMasked && this.answer.texts !== null,
        tabindex: -1,
        "aria-label": label,
        on: { click: () => this.open(at), focus: () => this.select(at, false) },
      },
      text !== null ? visible(text) : this.isOver && at >= this.nBefore ? "" : this.name(at),
    );
  }

  arranged() {
    const group = { role: "group", "aria-label": "Tokens; arrow keys move, Enter opens", on: { keydown: (event) => this.key(event) } };
    const { picture } = this.answer;
    if (!picture) {
      const nHidden = this.cells.filter((cell) => cell.hidden).length;
      const note = nHidden ? element("p", { class: "hint" }, `${short(nHidden)} tokens that the mask leaves out are not shown.`) : null;
      return element("div", group, element("div", { class: this.answer.texts ? "text" : "list" }, this.cells), note);
    }
    const [height, width] = picture.image_px;
    const cells = element("div", { class: "patches", style: { "grid-template-columns": `repeat(${this.columns}, 1fr)` } }, this.cells.slice(this.nBefore));
    const frame = element("div", { class: "picture", style: { "aspect-ratio": `${width} / ${height}` } });
    let note = null;
    if (this.isOver) {
      frame.append(element("img", { src: picture.src, alt: `The image of example ${this.answer.example}, as the model saw it` }));
      cells.classList.add("over");
      cells.style.setProperty("height", `${picture.covered[0] * 100}%`);
      cells.style.setProperty("width", `${picture.covered[1] * 100}%`);
    } else if (picture.src) {
      const caption = "The whole image. The metadata do not say how it was resized and cropped, so tokens are not drawn over it.";
      note = element("figure", {}, element("img", { src: picture.src, class: "whole", alt: `The image of example ${this.answer.example}` }), element("figcaption", {}, caption));
    } else if (picture.why_not) note = element("p", { class: "hint" }, `No image: ${picture.why_not}`);
    frame.append(cells);
    return element("div", group, element("div", { class: "special" }, this.cells.slice(0, this.nBefore)), frame, note);
  }

  controls() {
    const modes = [["components", "principal components (RGB)"], ["norm", "norm"], ...Object.keys(this.answer.token_arrays).map((name) => [name, name]), ["none", "nothing"]];
    const select = element("select", { id: "colour", on: { change: (event) => this.choose("colour", (this.mode = event.target.value)) } },
      modes.map(([value, text]) => element("option", { value, selected: value === this.mode }, text)));
    const range = element("input", { id: "overlay", type: "range", min: 0, max: 100, value: this.overlay, on: { input: (event) => this.choose("overlay", (this.overlay = Number(event.target.value))) } });
    const overlay = this.isOver ? [element("label", { for: "overlay" }, " Overlay "), range] : [];
    return element("div", { class: "controls" }, element("label", { for: "colour" }, "Colour by "), select, overlay, this.legend);
  }

  // Draws again with another choice, and keeps it in the address and on the way to a token.
  choose(name, value) {
    amend({ [name]: value });
    this.paint();
    this.select(this.at, false);
  }

  // The meaning of the colours.
  meaning() {
    const { variance_shares: shares, norms } = this.answer;
    const nLost = norms.filter((norm) => norm === null).length;
    const grey = nLost ? swatch(GREY, `${short(nLost)} of ${short(norms.length)} tokens are not finite`) : null;
    if (this.mode === "none") return [];
    if (this.mode === "norm") return this.least === null ? [grey] : ["L2 norm: ", colourBar(this.least, this.most), grey];
    if (this.mode === "components") {
      const swatches = shares.map((share, at) => swatch(["#e00000", "#00a000", "#3050ff"][at], `${at + 1}: ${Math.round(share * 100)} %`));
      return ["Principal components, by their share of the variance of the sample: ", swatches, grey];
    }
    const values = [...new Set(this.cells.map((_, at) => this.value(this.mode, at)).filter((value) => value !== undefined))].sort((one, other) => one - other);
    if (values.length > MOST_NAMED) return [`${this.mode}: ${short(values.length)} values from ${short(values[0])} to ${short(values.at(-1))}; neighbouring values differ in colour.`];
    return [`${this.mode}: `, values.map((value) => swatch(this.colourOf(value), `${value}`))];
  }

  colour(at) {
    const norm = this.answer.norms[at];
    if (this.mode === "none") return null;
    if (this.mode === "components") return this.answer.colours[at];
    if (this.mode === "norm") return norm === null ? GREY : scaled(this.most > this.least ? (norm - this.least) / (this.most - this.least) : 0.5);
    return this.colourOf(this.value(this.mode, at));
  }

  colourOf(value) {
    if (typeof value === "number") return categorical(Math.abs(Math.round(value)));
    return value === undefined || value === null ? GREY : value ? YES : NO;
  }

  paint() {
    this.legend.replaceChildren(...this.meaning().flat(2).filter(Boolean));
    const alpha = Math.round((this.overlay / 100) * 255).toString(16).padStart(2, "0");
    this.cells.forEach((cell, at) => {
      const colour = this.colour(at);
      const isPatch = this.isOver && at >= this.nBefore;
      cell.style.setProperty("background-color", colour === null ? "transparent" : colour + (isPatch ? alpha : ""));
      cell.style.setProperty("color", colour === null ? "inherit" : readableOn(colour));
    });
  }

  select(at, focus = true) {
    const [before, cell] = [this.cells[this.at], this.cells[at]];
    before?.setAttribute("tabindex", "-1");
    before?.classList.remove("chosen");
    this.at = at;
    cell.setAttribute("tabindex", "0");
    cell.classList.add("chosen");
    if (focus) cell.focus();
    if (this.grid.isConnected) amend({ token: this.answer.first + at - this.answer.special.length });
    const text = this.text(at);
    const values = Object.keys(this.answer.token_arrays).map((name) => [name, this.value(name, at)]).filter(([, value]) => value !== undefined);
    this.details.replaceChildren(
      element("p", {},
        element("strong", {}, `Token ${this.name(at)}`), text === null ? "" : element("span", { class: "context" }, ` “${visible(text, 400)}”`),
        `: norm ${short(this.answer.norms[at])}`, values.map(([name, value]) => `, ${name} ${value}`), ". ",
        element("a", { href: this.addressOf(at) }, "Vector and neighbours")),
    );
  }

  addressOf(at) {
    return tokenAddress(this.answer, this.answer.example, this.answer.first + at, { ...kept(), layer: this.answer.layer });
  }

  open(at) {
    location.hash = this.addressOf(at);
  }

  key(event) {
    const row = this.columns || this.rowLength();
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row }[event.key];
    if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const to = this.at + step;
    if (this.cells[to] && !this.cells[to].hidden) this.select(to);
  }

  // The number of cells in a row of a list that wraps.
  rowLength() {
    const top = this.cells[0].offsetTop;
    return Math.max(1, this.cells.findIndex((cell) => cell.offsetTop > top));
  }
}

export function exampleKeys(event, state, store) {
  const step = { n: 1, p: -1 }[event.key];
  const chosen = document.querySelector(".token.chosen");
  if (step !== undefined) {
    const to = Number(state.parts[0] || 0) + step;
    if (to >= 0 && to < store.n_examples) go("example", [to], kept());
    return true;
  }
  if (!event.key.startsWith("Arrow")) return false;
  chosen?.focus();
  chosen?.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, bubbles: true }));
  return true;
}
