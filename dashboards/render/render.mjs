// node render.mjs PROMETHEUS_URL FROM_S TO_S OUT_DIR BOARD.json …: one PNG a dashboard. Fails for a panel without data, a query that
// was refused, an error on the console, or a panel that the page does not show. Chromium is Debian's; everything is on the loopback.
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';
import { convert } from './convert.mjs';

const WAIT_MS = 240_000;
const SETTLE_MS = 3_000;
const TYPES = { '.js': 'text/javascript', '.html': 'text/html', '.css': 'text/css' };
const dist = path.join(path.dirname(fileURLToPath(import.meta.url)), 'dist');

function serve(current) {
  const server = http.createServer((request, response) => {
    const asked = new URL(request.url, 'http://x').pathname;
    if (asked === '/dashboard.json') {
      response.setHeader('content-type', 'application/json');
      response.end(JSON.stringify(current.dashboard));
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

async function render(browser, origin, current, grafana, [url, from, to, out]) {
  current.dashboard = convert(grafana);
  const rows = grafana.panels.map((panel) => panel.gridPos.y + panel.gridPos.h);
  const page = await browser.newPage({ viewport: { width: 1600, height: 160 + Math.max(...rows) * 42 } });
  const wrong = [];
  let open = 0;
  let answered = 0;
  const isQuery = (request) => request.url().includes('/api/v1/');
  page.on('console', (message) => message.type() === 'error' && wrong.push(`console: ${message.text().slice(0, 300)}`));
  page.on('pageerror', (error) => wrong.push(`page: ${String(error).slice(0, 300)}`));
  page.on('request', (request) => { open += isQuery(request) ? 1 : 0; });
  page.on('requestfailed', (request) => { open -= isQuery(request) ? 1 : 0; });
  page.on('requestfinished', async (request) => {
    if (!isQuery(request)) return;
    open -= 1;
    answered += 1;
    const status = (await request.response())?.status();
    if (status !== 200) wrong.push(`${status}: ${decodeURIComponent(request.url()).slice(0, 300)}`);
  });
  await page.goto(`${origin}/?prometheus=${encodeURIComponent(url)}&from=${from * 1000}&to=${to * 1000}`);
  const until = Date.now() + WAIT_MS;
  const wanted = grafana.panels.filter((panel) => panel.type !== 'row').length;
  let quiet = 0;
  while (quiet < SETTLE_MS && Date.now() < until) {
    await page.waitForTimeout(250);
    quiet = open === 0 && answered >= wanted ? quiet + 250 : 0;
  }
  if (quiet < SETTLE_MS) wrong.push(`${answered} queries answered and ${open} open after ${WAIT_MS / 1000} s`);
  for (const panel of grafana.panels) {
    const found = await page.getByText(panel.title, { exact: true }).count();
    if (found === 0) wrong.push(`not shown: ${panel.title}`);
  }
  const empty = await page.getByText('No data').count();
  if (empty) wrong.push(`${empty} panels without data`);
  wrong.push(...(await page.locator('#fatal').allTextContents()));
  await page.screenshot({ path: path.join(out, `${grafana.uid}.png`), fullPage: true });
  await page.close();
  console.log(`${grafana.uid}: ${wanted} panels, ${answered} queries, ${wrong.length} faults`);
  [...new Set(wrong)].forEach((line) => console.log(`  ${line}`));
  return wrong.length;
}

const [url, from, to, out, ...boards] = process.argv.slice(2);
const current = {};
const server = await serve(current);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
let faults = 0;
try {
  fs.mkdirSync(out, { recursive: true });
  for (const board of boards) {
    const grafana = JSON.parse(fs.readFileSync(board, 'utf8'));
    faults += await render(browser, `http://127.0.0.1:${server.address().port}`, current, grafana, [url, Number(from), Number(to), out]);
  }
} finally {
  await browser.close();
  server.close();
}
process.exitCode = faults ? 1 : 0;
