// Reads the address, draws its view, and answers keys.
import { compareKeys, compareView } from "./compare_view.js";
import { element } from "./dom.js";
import { exampleKeys, exampleView } from "./example_view.js";
import { layersView } from "./layers_view.js";
import { address, ask, go, kept, read } from "./state.js";
import { storeView } from "./store_view.js";
import { tokenKeys, tokenView } from "./token_view.js";

const VIEWS = {
  store: { title: "Store", key: "s", draw: storeView },
  layers: { title: "Layers", key: "l", draw: layersView },
  example: { title: "Examples", key: "e", draw: exampleView, keys: exampleKeys },
  compare: { title: "Compare", key: "c", draw: compareView, keys: compareKeys, needs: "other" },
  token: { draw: tokenView, keys: tokenKeys },
};
const KEYS = [
  ["/", "go to an example"],
  ["?", "this list"],
  ["s, l, e", "store, layers, examples"],
  ["c", "comparison with a second store"],
  ["[ and ]", "previous and next layer"],
  ["n and p", "next and previous example"],
  ["arrows", "move over the tokens"],
  ["Enter", "open the chosen token"],
  ["Escape", "from a token back to its example"],
];
const find = (id) => document.getElementById(id);
let store = null;
let shown = null;

async function draw() {
  const state = read();
  const view = VIEWS[state.view];
  const main = find("main");
  main.setAttribute("aria-busy", "true");
  try {
    store ??= await ask("store");
    header(state);
    if (!view) throw new Error(`There is no view ${state.view}.`);
    const parts = await view.draw(state, store);
    const hadFocus = main.contains(document.activeElement);
    // A link in the middle of a page leads to the top of the next one.
    const isOther = state.view !== shown || (hadFocus && document.activeElement.tagName === "A");
    main.replaceChildren(...parts.filter(Boolean));
    if (isOther) scrollTo(0, 0);
    shown = state.view;
    if (hadFocus) (main.querySelector(".token.chosen") || main).focus({ preventScroll: true });
  } catch (error) {
    if (error.name === "AbortError") return;
    main.replaceChildren(failure(error));
  }
  const title = main.querySelector("h1")?.textContent || "saev_store";
  document.title = `${title} – saev_store`;
  find("status").textContent = title;
  main.setAttribute("aria-busy", "false");
}

function failure(error) {
  return element(
    "section",
    { class: "error" },
    element("h1", {}, "This cannot be shown"),
    element("p", {}, error.kind ? element("code", {}, error.kind) : null, ` ${error.message}`),
    error.remedy ? element("p", {}, error.remedy) : null,
  );
}

function header(state) {
  const layer = state.query.get("layer");
  const links = Object.entries(VIEWS).filter(([name, view]) => view.title && (!view.needs || store[view.needs]));
  find("nav").replaceChildren(
    ...links.map(([name, view]) => {
      const isCurrent = name === state.view || (name === "example" && state.view === "token");
      const to = name === "example" && state.view === "token" ? address("example", [state.parts[0]], { ...kept(), token: state.parts[1] }) : address(name, [], { layer });
      return element("a", { href: to, "aria-current": isCurrent ? "page" : null }, view.title);
    }),
  );
  const chosen = layer ?? store.layers.at(-1);
  find("layer").replaceChildren(...store.layers.map((name) => element("option", { value: name, selected: name === chosen }, name)));
  find("example").value = ["example", "token", "compare"].includes(state.view) ? state.parts[0] || "0" : "";
  find("of").textContent = `of ${store.n_examples.toLocaleString("en")}`;
}

function toLayer(layer) {
  const state = read();
  const view = VIEWS[state.view] && state.view !== "store" ? state.view : "layers";
  go(view, view === state.view ? state.parts : [], { ...Object.fromEntries(state.query), layer });
}

function nextLayer(step) {
  const now = store.layers.indexOf(read().query.get("layer") ?? store.layers.at(-1));
  const to = store.layers[now + step];
  if (to !== undefined) toLayer(to);
}

function help(isOpen) {
  const dialog = find("help");
  if (isOpen && !dialog.open) dialog.showModal();
  if (!isOpen) dialog.close();
}

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (isTyping) {
    if (event.key === "Escape") find("main").focus();
    return;
  }
  const state = read();
  const named = Object.entries(VIEWS).find(([, view]) => view.key === event.key && (!view.needs || store?.[view.needs]));
  if (event.key === "?") help(true);
  else if (!store) return;
  else if (event.key === "/") find("example").select();
  else if (event.key === "[" || event.key === "]") nextLayer(event.key === "]" ? 1 : -1);
  else if (named) go(named[0], [], { layer: state.query.get("layer") });
  else if (!VIEWS[state.view]?.keys?.(event, state, store)) return;
  event.preventDefault();
}

find("keys").replaceChildren(...KEYS.map(([key, text]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, text))));
find("help-button").addEventListener("click", () => help(true));
find("close-help").addEventListener("click", () => help(false));
find("layer").addEventListener("change", (event) => toLayer(event.target.value));
find("skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});
find("jump").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("example").value.trim();
  const example = Number(text);
  if (!/^\d+$/.test(text) || example >= store.n_examples) {
    find("status").textContent = `There is no example ${text}; there are 0 to ${store.n_examples - 1}.`;
    return;
  }
  find("main").focus();
  go("example", [example], kept());
});
addEventListener("keydown", onKey);
addEventListener("hashchange", draw);
draw();
