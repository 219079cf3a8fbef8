// What Chromium measures of the page: its first paint and its first whole view, and the moves from token to token.
// Usage: node view_paint.mjs JSON; see view.py.
import { createRequire } from "node:module";
import { join } from "node:path";

const told = JSON.parse(process.argv[2]);
const { chromium } = createRequire(join(told.modules, "x.js"))("playwright-core");
const browser = await chromium.launch({ executablePath: told.chromium, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const page = await browser.newPage();
const ready = () => page.waitForSelector("main[aria-busy=false] h1");
await page.goto("about:blank");
await page.goto(told.url);
await ready();
const first = await page.evaluate(() => ({
  "first paint": performance.getEntriesByName("first-contentful-paint")[0].startTime,
  "store shown": performance.now(),
}));
await page.evaluate(() => (location.hash = "#/token/3/1?layer=7"));
await page.waitForFunction(() => document.title.startsWith("Token 0 of example 3"));
// In the page, so that the time is that from the key to the drawn view.
const clicks = await page.evaluate(async (n) => {
  const main = document.getElementById("main");
  const spent = [];
  for (let at = 0; at < n; at++) {
    const before = document.title;
    const start = performance.now();
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key: at % 40 < 20 ? "ArrowRight" : "ArrowLeft", bubbles: true }));
    while (document.title === before || main.getAttribute("aria-busy") === "true") await new Promise((done) => setTimeout(done, 1));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    spent.push(performance.now() - start);
  }
  return spent.sort((a, b) => a - b)[n >> 1];
}, told.clicks);
await browser.close();
console.log(JSON.stringify({ ...first, "next token": clicks }));
