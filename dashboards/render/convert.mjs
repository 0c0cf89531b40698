// From Grafana's dashboard JSON to a Perses dashboard that draws the same queries. Throws on whatever it does not know, so that no
// panel is left out in silence. Thresholds, units, stacking and legends carry over; links, notes and the text mode of stats do not.
const UNITS = {
  s: { unit: 'seconds' }, percentunit: { unit: 'percent-decimal' }, ops: { unit: 'ops/sec' }, bytes: { unit: 'bytes' },
  Bps: { unit: 'bytes/sec' }, short: { unit: 'decimal', shortValues: true },
};
const COLOURS = { green: '#299c46', red: '#c4162a', text: '#9fa7b3' };

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
        display: custom.drawStyle === 'bars' ? 'bar' : 'line', lineWidth: 1.25, areaOpacity: (custom.fillOpacity ?? 0) / 100,
        ...(isStacked ? { stack: 'all' } : {}),
      },
    };
    if (custom.thresholdsStyle) spec.thresholds = thresholds(panel);
    return { kind: 'TimeSeriesChart', spec };
  },
  stat(panel, format) {
    const label = /^{{(\w+)}}$/.exec(panel.targets[0].legendFormat)?.[1];
    const isName = panel.options.textMode === 'name';
    return {
      kind: 'StatChart',
      spec: { calculation: 'last-number', format, thresholds: thresholds(panel), ...(isName ? { metricLabel: label } : { sparkline: {} }) },
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
  return {
    kind: 'Dashboard', metadata: { name: grafana.uid, project: 'rollbook', version: 0 },
    spec: { display: { name: grafana.title }, duration: '30m', refreshInterval: '0s', variables, panels, layouts },
  };
}
