// From Grafana's dashboard JSON to a Perses dashboard that draws the same queries. Throws on whatever it does not know, so that no
// panel is left out in silence. Thresholds, units, stacking and legends carry over; links do not, and notes are handed over as they are.
// node convert.mjs < BOARD.json prints {dashboard, notes}.
import fs from 'node:fs';
import { pathToFileURL } from 'node:url';

const UNITS = {
  s: { unit: 'seconds' }, percentunit: { unit: 'percent-decimal' }, ops: { unit: 'ops/sec' }, bytes: { unit: 'bytes' },
  Bps: { unit: 'bytes/sec' }, short: { unit: 'decimal', shortValues: true },
};
const FAINT = 5; // a fill that Perses would put below the first series only
const COLOURS = { green: '#37b24d', red: '#e03131', text: '#9fa7b3', orange: '#f08c00', blue: '#4dabf7', purple: '#9775fa' };

function known(table, key, what) {
  if (!(key in table)) throw new Error(`unknown ${what}: ${key}`);
  return table[key];
}

function thresholds(panel) {
  const [first, ...steps] = panel.fieldConfig.defaults.thresholds.steps;
  return {
    mode: 'absolute', defaultColor: known(COLOURS, first.color, 'colour'),
    steps: steps.map((step) => ({ value: step.value, color: known(COLOURS, step.color, 'colour') })),
  };
}

const KINDS = {
  timeseries(panel, format) {
    const custom = panel.fieldConfig.defaults.custom;
    const isStacked = custom.stacking?.mode === 'normal';
    const spec = {
      legend: { position: 'bottom', mode: 'list' },
      yAxis: { format, ...(panel.fieldConfig.defaults.min === 0 ? { min: 0 } : {}) },
      visual: {
        display: custom.drawStyle === 'bars' ? 'bar' : 'line', lineWidth: 1.5, areaOpacity: custom.fillOpacity > FAINT ? custom.fillOpacity / 100 : 0,
        palette: { mode: 'categorical' },
        ...(isStacked ? { stack: 'all' } : {}),
      },
    };
    if (custom.thresholdsStyle) spec.thresholds = thresholds(panel);
    return { kind: 'TimeSeriesChart', spec };
  },
  stat(panel, format) {
    const label = /^{{(\w+)}}$/.exec(panel.targets[0].legendFormat)?.[1];
    const isName = panel.options.textMode === 'name';
    const isInstant = panel.targets.every((target) => target.instant);
    return {
      kind: isInstant ? 'InstantStat' : 'StatChart',
      spec: {
        calculation: 'last-number', format, thresholds: thresholds(panel),
        ...(isName ? { metricLabel: label } : {}), ...(isInstant ? {} : { sparkline: {} }),
      },
    };
  },
  heatmap() {
    return { kind: 'ClassicHeatmap', spec: {} };
  },
};

function query(target) {
  return {
    kind: 'TimeSeriesQuery',
    spec: { plugin: { kind: 'PrometheusTimeSeriesQuery', spec: { query: target.expr, seriesNameFormat: target.legendFormat } } },
  };
}

function variable(from) {
  const match = /^label_values\((.+), (\w+)\)$/.exec(from.query);
  if (!match) throw new Error(`unknown variable: ${from.query}`);
  return {
    kind: 'ListVariable',
    spec: {
      name: from.name, display: { name: from.label }, allowAllValue: from.multi, allowMultiple: from.multi,
      ...(from.multi ? { customAllValue: '.+', defaultValue: ['$__all'] } : {}),
      plugin: { kind: 'PrometheusLabelValuesVariable', spec: { labelName: match[2], matchers: [match[1]] } },
    },
  };
}

function note(from) {
  return { name: from.name, expr: from.expr, text: from.textFormat, colour: known(COLOURS, from.iconColor, 'colour') };
}

export function convert(grafana) {
  const panels = {};
  const layouts = [];
  let row;
  let top = 0;
  for (const panel of grafana.panels) {
    const at = panel.gridPos;
    if (panel.type === 'row') {
      row = { kind: 'Grid', spec: { display: { title: panel.title, collapse: { open: true } }, items: [] } };
      layouts.push(row);
      top = at.y + 1;
      continue;
    }
    const id = `panel${panel.id}`;
    const format = known(UNITS, panel.fieldConfig.defaults.unit, 'unit');
    panels[id] = {
      kind: 'Panel',
      spec: { display: { name: panel.title }, plugin: known(KINDS, panel.type, 'panel')(panel, format), queries: panel.targets.map(query) },
    };
    row.spec.items.push({ x: at.x, y: at.y - top, width: at.w, height: at.h, content: { $ref: `#/spec/panels/${id}` } });
  }
  const variables = grafana.templating.list.filter((v) => v.type === 'query').map(variable);
  const dashboard = {
    kind: 'Dashboard', metadata: { name: grafana.uid, project: 'rollbook', version: 0 },
    spec: { display: { name: grafana.title }, duration: '30m', refreshInterval: '0s', variables, panels, layouts },
  };
  return { dashboard, notes: (grafana.annotations.list ?? []).filter((one) => one.enable).map(note) };
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  try {
    process.stdout.write(JSON.stringify(convert(JSON.parse(fs.readFileSync(0, 'utf8')))));
  } catch (error) {
    console.error(`convert: ${error.message}`);
    process.exitCode = 1;
  }
}
