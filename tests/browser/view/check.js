// Walks through the page by keyboard alone, looks for faults of accessibility, and takes pictures.
// Usage: node check.js STATE.json; its answer is one JSON document on standard output.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const told = JSON.parse(readFileSync(process.argv[2]));
// The libraries lie elsewhere than this file.
const load = createRequire(join(told.modules, "x.js"));
const { chromium } = load("playwright-core");
const axe = readFileSync(join(told.modules, "axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({ executablePath: told.chromium, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const problems = [];
const requested = new Set();

async function opened(context, url) {
  const page = await context.newPage();
  page.on("pageerror", (error) => problems.push(`${error}`));
  page.on("console", (message) => message.type() === "error" && !/status of 4(10|00)/.test(message.text()) && problems.push(message.text()));
  page.on("request", (request) => requested.add(new URL(request.url()).origin));
  await page.goto(url);
  await ready(page);
  return page;
}

async function ready(page) {
  await page.waitForSelector("main[aria-busy=false] h1");
}

// Presses keys and waits until the title begins as told.
async function press(page, keys, title) {
  for (const key of keys) await page.keyboard.press(key);
  await page.waitForFunction((start) => document.title.startsWith(start), title, { timeout: 20000 }).catch(async () => {
    problems.push(`after ${keys}: ${await page.title()}, not ${title}`);
  });
  await ready(page);
}

async function keyboard() {
  const page = await opened(await browser.newContext(), told.images);
  const at = async (wanted) => {
    const hash = await page.evaluate(() => location.hash);
    if (!wanted.test(hash)) problems.push(`the address is ${hash}, not ${wanted}`);
  };
  await press(page, ["l"], "Layers, and dimensions of layer 11");
  await press(page, ["["], "Layers, and dimensions of layer 5");
  await press(page, ["e"], "Example 0, layer 5");
  await press(page, ["/", "3", "Enter"], "Example 3, layer 5");
  await press(page, ["n"], "Example 4, layer 5");
  await press(page, ["p"], "Example 3, layer 5");
  await press(page, ["ArrowRight", "ArrowRight", "ArrowDown"], "Example 3, layer 5");
  await at(/token=5/);
  await press(page, ["Enter"], "Token 5 of example 3, layer 5");
  await at(/^#\/token\/3\/5\?layer=5$/);
  await press(page, ["ArrowRight"], "Token 6 of example 3");
  await press(page, ["ArrowUp"], "Token 2 of example 3");
  await press(page, ["]"], "Token 2 of example 3, layer 11");
  await press(page, ["Escape"], "Example 3, layer 11");
  await page.keyboard.press("?");
  if (!(await page.isVisible("#help"))) problems.push("? shows no help");
  await page.keyboard.press("Escape");
  if (await page.isVisible("#help")) problems.push("Escape does not close the help");
  await page.reload();
  await press(page, [], "Example 3, layer 11");
  await press(page, ["c"], "Compared with");
  await press(page, ["s"], "Store");
  // What an example is coloured by stays the same on the way to a token and back; an address may be wrong.
  await page.goto(`${told.images}#/example/3?layer=5&token=7&colour=norm&overlay=x`);
  await press(page, [], "Example 3, layer 5");
  await press(page, ["ArrowRight", "Enter"], "Token 8 of example 3");
  await press(page, ["ArrowRight", "Escape"], "Example 3, layer 5");
  await at(/colour=norm.*token=9/);
  await page.goto(`${told.images}#/example/3?token=none`);
  await press(page, [], "This cannot be shown");
  if (!/token must be an integer/.test(await page.innerText("main"))) problems.push(await page.innerText("main"));
  await page.goto(`${told.images}#/nothing`);
  await press(page, [], "This cannot be shown");
  // The page of an example with the token that one comes from.
  await page.goto(`${told.long}#/token/1/2400`);
  await press(page, [], "Token 2400");
  await press(page, ["Escape"], "Example 1, layer 2");
  const chosen = await page.getAttribute(".token.chosen", "aria-label");
  if (!/^token 2400,/.test(chosen)) problems.push(`Escape leads to ${chosen}`);
  await page.evaluate(() => scrollTo(0, 1e6));
  await press(page, ["l"], "Layers");
  if (await page.evaluate(() => scrollY)) problems.push("another view does not begin at its top");
}

async function sound() {
  const context = await browser.newContext({ viewport: { width: 400, height: 760 } });
  const store = await opened(context, told.pictures.store);
  const lost = await store.locator("table", { hasText: "Damaged shards" }).innerText();
  if (!/4 to 7/.test(lost) || !/8 to 9/.test(lost)) problems.push(`the damaged shards are ${lost}`);
  for (const url of told.sound) {
    const page = await opened(context, url);
    const text = await page.innerText("main");
    const odd = text.match(/.*(NaN|Infinity|undefined|\[object|function|cannot be shown|[\u202e\u200b\0])[^]{0,80}/);
    if (odd) problems.push(`${url}: ${odd[0]}`);
    if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) problems.push(`${url} is wider than the window`);
    await page.close();
  }
}

async function faults() {
  for (const colorScheme of ["light", "dark"]) {
    // The page's policy forbids foreign scripts: here it is set aside for the one that looks for faults.
    const context = await browser.newContext({ colorScheme, bypassCSP: true });
    for (const url of told.pages) {
      const page = await opened(context, url);
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => window.axe.run());
      for (const { id, impact, nodes } of violations) problems.push(`${impact} ${id} ${colorScheme} ${nodes[0].html}`);
      await page.close();
    }
  }
}

async function pictures() {
  for (const colorScheme of ["light", "dark"]) {
    for (const [name, width] of [["wide", 1100], ["narrow", 400]]) {
      const context = await browser.newContext({ colorScheme, viewport: { width, height: 760 } });
      for (const [view, url] of Object.entries(told.pictures)) {
        const page = await opened(context, url);
        await page.waitForLoadState("networkidle");
        const scrolls = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
        if (scrolls) problems.push(`${view} ${name}: the page is wider than the window`);
        await page.screenshot({ path: join(told.folder, `${view}-${name}-${colorScheme}.png`) });
        await page.close();
      }
    }
  }
}

await keyboard();
await sound();
await faults();
await pictures();
await browser.close();
console.log(JSON.stringify({ problems, origins: [...requested] }));
