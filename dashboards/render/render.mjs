// node render.mjs < PLAN: one PNG a page. A plan is {chromium, out, prometheus, start, end, scrape, mayBeEmpty, pages: [{uid, titles,
// dashboard, notes, caption}]}. Fails for a panel without data or without anything drawn, a title that is cut, a query that was refused, and an
// error on the console. Chromium is Debian's; everything is on the loopback.
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';
import { judge } from './judge.mjs';

const WAIT_MS = 120_000;
const SETTLE_MS = 1_500;
const LOOK_AGAIN_MS = 500;
const WIDTH = 1600;
const TYPES = { '.js': 'text/javascript', '.html': 'text/html', '.css': 'text/css' };
const dist = path.join(path.dirname(fileURLToPath(import.meta.url)), 'dist');

function serve(current) {
  const server = http.createServer((request, response) => {
    const asked = new URL(request.url, 'http://x').pathname;
    if (asked === '/page.json') {
      response.setHeader('content-type', 'application/json');
      response.end(JSON.stringify(current.page));
      return;
    }
    const file = path.join(dist, path.normalize(asked));
    const isFile = file.startsWith(dist) && fs.existsSync(file) && fs.statSync(file).isFile();
    const shown = isFile ? file : path.join(dist, 'index.html');
    response.setHeader('content-type', TYPES[path.extname(shown)] ?? 'application/octet-stream');
    response.end(fs.readFileSync(shown));
  });
  return new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(server)));
}

// Runs in the page before all else: a chart's words are pixels, so each canvas remembers what was written on it last.
function rememberWords() {
  const context = CanvasRenderingContext2D.prototype;
  const { clearRect, fillText } = context;
  context.clearRect = function clear(...at) {
    if (at[0] === 0 && at[1] === 0) this.canvas.words = [];
    return clearRect.apply(this, at);
  };
  context.fillText = function fill(text, ...at) {
    (this.canvas.words ??= []).push(String(text));
    return fillText.call(this, text, ...at);
  };
}

// Runs in the page: what each panel shows.
function look() {
  return [...document.querySelectorAll('[data-testid="panel"]')].map((panel) => {
    const heading = panel.querySelector('header .MuiTypography-root') ?? panel;
    const legend = panel.querySelector('ul');
    const words = [...panel.querySelectorAll('canvas')].flatMap((canvas) => canvas.words ?? []);
    const title = heading.textContent.trim();
    return {
      title, isCut: heading.scrollWidth > heading.clientWidth, isLegendCut: legend?.scrollHeight > legend?.clientHeight, bottom: panel.getBoundingClientRect().bottom,
      words: [...words, ...panel.innerText.split('\n').map((line) => line.trim()).filter((line) => line && line !== title)],
      isDrawn: words.length > 0 || Boolean(panel.querySelector('svg path')),
    };
  });
}

// Every query and every word on the console of a page.
function listen(page) {
  const heard = { wrong: [], open: 0, answered: 0 };
  const isQuery = (request) => request.url().includes('/api/v1/');
  page.on('console', (message) => message.type() === 'error' && heard.wrong.push(`console: ${message.text().slice(0, 300)}`));
  page.on('pageerror', (error) => heard.wrong.push(`page: ${String(error).slice(0, 300)}`));
  page.on('request', (request) => { heard.open += isQuery(request) ? 1 : 0; });
  page.on('requestfailed', (request) => {
    if (!isQuery(request)) return;
    heard.open -= 1;
    heard.wrong.push(`not answered: ${request.url().slice(0, 300)} ${request.postData()?.slice(0, 300) ?? ''}`);
  });
  page.on('requestfinished', async (request) => {
    if (!isQuery(request)) return;
    heard.open -= 1;
    heard.answered += 1;
    const status = (await request.response())?.status();
    if (status !== 200) heard.wrong.push(`${status}: ${decodeURIComponent(request.postData() ?? request.url()).slice(0, 300)}`);
  });
  return heard;
}

// One page from its start until it rests; leaves the picture.
async function draw(browser, origin, plan, { uid, titles, ...given }, current) {
  current.page = { ...given, prometheus: plan.prometheus, scrape: plan.scrape };
  const rows = given.dashboard.spec.layouts.map(({ spec }) => Math.max(...spec.items.map((item) => item.y + item.height)) + 2);
  const height = 400 + 42 * rows.reduce((sum, row) => sum + row, 0);
  const page = await browser.newPage({ viewport: { width: WIDTH, height }, timezoneId: 'UTC', locale: 'en-GB' });
  await page.addInitScript(rememberWords);
  const heard = listen(page);
  await page.goto(`${origin}/?start=${plan.start * 1000}&end=${plan.end * 1000}`);
  const until = Date.now() + WAIT_MS;
  let quiet = 0;
  let seen = [];
  while (quiet < SETTLE_MS && Date.now() < until) {
    await page.waitForTimeout(LOOK_AGAIN_MS);
    seen = await page.evaluate(look);
    const isWhole = seen.length >= titles.length && seen.every((panel) => panel.words.length > 0);
    quiet = isWhole && heard.open === 0 ? quiet + LOOK_AGAIN_MS : 0;
  }
  const { wrong, told } = judge(titles, seen, plan.mayBeEmpty);
  wrong.push(...heard.wrong, ...(await page.locator('#fatal').allTextContents()));
  if (quiet < SETTLE_MS) wrong.push(`not at rest after ${WAIT_MS / 1000} s: ${heard.answered} queries answered, ${heard.open} open`);
  const bottom = Math.max(0, ...seen.map((panel) => panel.bottom)) + 16;
  if (bottom > height) wrong.push(`the page is ${Math.ceil(bottom - height)} pixels longer than its window`);
  await page.screenshot({ path: path.join(plan.out, `${uid}.png`), clip: { x: 0, y: 0, width: WIDTH, height: Math.min(bottom, height) } });
  await page.close();
  console.log(`${uid}: ${titles.length} panels, ${heard.answered} queries, ${wrong.length} faults`);
  told.forEach((line) => console.log(`  ${line}`));
  new Set(wrong).forEach((line) => console.log(`  FAULT ${line}`));
  return wrong.length;
}

const plan = JSON.parse(fs.readFileSync(0, 'utf8'));
const current = {};
const server = await serve(current);
const browser = await chromium.launch({
  executablePath: plan.chromium,
  // No GPU and none in software: the latter would repaint the long page for every canvas, in most of the time.
  args: [
    '--no-sandbox', '--disable-gpu', '--disable-software-rasterizer', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync',
  ],
});
let faults = 0;
try {
  for (const page of plan.pages) faults += await draw(browser, `http://127.0.0.1:${server.address().port}`, plan, page, current);
} finally {
  await browser.close();
  server.close();
}
process.exitCode = faults ? 1 : 0;
