// Makes elements, texts and numbers. Texts of a store become text nodes, never markup.

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "style") for (const [rule, set] of Object.entries(value)) made.style.setProperty(rule, set);
    else if (key === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

export function section(title, ...children) {
  return element("section", { "aria-label": title }, element("h2", {}, title), ...children);
}

// A table with a caption for screen readers. Cells are texts, numbers or elements.
export function table(caption, head, rows) {
  const cell = (value, tag) => {
    const isNumber = typeof value === "number" || value === null;
    const text = isNumber ? short(value) : value;
    return element(tag, { class: isNumber ? "number" : null, scope: tag === "th" ? "row" : null }, text);
  };
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, head.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, rows.map((row) => element("tr", {}, row.map((value, at) => cell(value, at ? "td" : "th"))))),
    ),
  );
}

export function short(value) {
  if (value === null || value === undefined) return "not finite";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// The smallest and the largest of some numbers without null; null where there are none. Lists may be long.
export function extent(values) {
  let found = null;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (found === null) found = [value, value];
    else if (value < found[0]) found[0] = value;
    else if (value > found[1]) found[1] = value;
  }
  return found;
}

// The name of a token by its place in storage order: as `token_idx` of loaders counts; special tokens by their names.
export function tokenName({ special }, token) {
  return special[token] ?? `${token - special.length}`;
}

// A text of a token as one can see it: without line breaks, controls, and marks that change the direction; not too long.
const ESCAPES = { "\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "␣", "": "(empty)" };
export function visible(text, most = 48) {
  if (Object.hasOwn(ESCAPES, text)) return ESCAPES[text];
  const shown = text.replace(/[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu, (mark) => ESCAPES[mark] ?? `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
  const marks = [...shown];
  return marks.length > most ? `${marks.slice(0, most).join("")}…` : shown;
}

// Black or white, whichever is easier to read on a colour "#rrggbb".
export function readableOn(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  const [red, green, blue] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

export function hex(red, green, blue) {
  return "#" + [red, green, blue].map((c) => Math.round(Math.min(255, Math.max(0, c))).toString(16).padStart(2, "0")).join("");
}

// Dark blue to yellow, of equal steps in lightness: readable with any colour vision, and without colours.
const SCALE = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89],
  [180, 222, 44], [253, 231, 37],
];
export function scaled(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (SCALE.length - 1);
  const [low, high] = [SCALE[Math.floor(at)], SCALE[Math.floor(at) + 1]];
  return hex(...low.map((c, i) => c + (high[i] - c) * (at % 1)));
}

// A bar of the colours of `scaled`, between two numbers.
export function colourBar(least, most) {
  const colours = [0, 0.25, 0.5, 0.75, 1].map(scaled).join(", ");
  return [short(least), element("span", { class: "bar", "aria-hidden": "true", style: { background: `linear-gradient(to right, ${colours})` } }), short(most)];
}

// A small square of one colour before its meaning.
export function swatch(colour, text) {
  return element("span", { class: "swatch" }, element("span", { "aria-hidden": "true", style: { background: colour } }), text);
}

// Colours of small integers such as labels: neighbours differ.
export function categorical(number) {
  const hue = (number * 137.508) % 360;
  const f = (n) => {
    const k = (n + hue / 30) % 12;
    return 255 * (0.55 - 0.3 * Math.max(-1, Math.min(k - 3, 9 - k, 1)));
  };
  return hex(f(0), f(8), f(4));
}
