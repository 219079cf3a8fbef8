// The state of the page is its address: #/VIEW/ARGUMENT/…?name=value. What is not in the address is not remembered.

export function read() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  return { view: parts[0] || "store", parts: parts.slice(1), query: new URLSearchParams(query || "") };
}

export function address(view, parts = [], query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${[view, ...parts].join("/")}${text ? `?${text}` : ""}`;
}

// Addresses count content tokens, as `token_idx` of loaders does: -1 is a special token.
export function tokenAddress({ special }, example, token, query) {
  return address("token", [example, token - special.length], query);
}

export function go(view, parts, query) {
  location.hash = address(view, parts, query);
}

// Changes the address without a step in the history and without drawing again.
export function amend(query) {
  const now = read();
  history.replaceState(null, "", address(now.view, now.parts, { ...Object.fromEntries(now.query), ...query }));
}

// Choices that stay the same on the way between an example and its tokens.
export function kept() {
  const { query } = read();
  return Object.fromEntries(["layer", "colour", "overlay"].map((name) => [name, query.get(name)]));
}

let running = null;

// The answer of the server. An earlier request that is still under way is given up.
export async function ask(name, query = {}) {
  running?.abort();
  running = new AbortController();
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const response = await fetch(`api/${name}?${new URLSearchParams(given)}`, { signal: running.signal });
  if (response.headers.get("content-type") !== "application/json") throw new Error(`the server answered ${response.status}`);
  const answer = await response.json();
  if (answer.error) throw Object.assign(new Error(answer.error.message), answer.error);
  return answer;
}
