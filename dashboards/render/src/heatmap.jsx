// Heatmap of a classic histogram: Perses' own draws native ones only. One series a bucket, cumulative in `le`.
import { useChartsTheme } from '@perses-dev/components';
import * as echarts from 'echarts';
import React from 'react';
import { noted } from './notes.jsx';

const bound = (series) => series.labels?.le ?? series.name;
const number = (text) => (text === '+Inf' ? Infinity : Number.parseFloat(text));

function cells(buckets, times) {
  const below = new Map(times.map((time) => [time, 0]));
  return buckets.flatMap((bucket, row) => {
    const reached = new Map(bucket.values);
    return times.map((time, column) => {
      const upTo = reached.get(time) ?? below.get(time);
      const within = Math.max(0, upTo - below.get(time));
      below.set(time, upTo);
      return [column, row, within];
    });
  });
}

function named(buckets) {
  return buckets.map((bucket, row) => {
    const le = number(bound(bucket));
    return Number.isFinite(le) ? `≤ ${le}` : row ? `> ${number(bound(buckets[row - 1]))}` : 'all';
  });
}

function Heatmap({ contentDimensions, queryResults }) {
  const place = React.useRef(null);
  const { echartsTheme } = useChartsTheme();
  const series = React.useMemo(() => (queryResults ?? []).flatMap((result) => result.data?.series ?? []), [queryResults]);
  React.useEffect(() => {
    if (!place.current || !series.length) return undefined;
    const buckets = [...series].sort((one, other) => number(bound(one)) - number(bound(other)));
    const times = [...new Set(buckets.flatMap((bucket) => bucket.values.map(([time]) => time)))].sort((one, other) => one - other);
    const data = cells(buckets, times);
    const most = Math.max(...data.map((cell) => cell[2]), 1e-9);
    const chart = echarts.init(place.current, echartsTheme, { renderer: 'canvas' });
    chart.times = times;
    chart.setOption({
      animation: false, grid: { left: 20, right: 20, top: 12, bottom: 8, containLabel: true },
      xAxis: { type: 'category', data: times.map((time) => new Date(time).toISOString().slice(11, 16)), splitLine: { show: false } },
      yAxis: { type: 'category', data: named(buckets), splitLine: { show: false }, axisLabel: { margin: 8 } },
      visualMap: { show: false, min: 0, max: most, inRange: { color: ['#10141f', '#1f3a6e', '#2a7f9e', '#6fbf73', '#f2d64b'] } },
      series: [{ type: 'heatmap', data, progressive: 0 }],
    });
    return () => chart.dispose();
  }, [contentDimensions?.width, contentDimensions?.height, series, echartsTheme]);
  if (!series.length) return <div>No data</div>;
  return <div ref={place} style={{ width: contentDimensions?.width, height: contentDimensions?.height }} />;
}

// Its axis counts columns: the one that a moment falls into.
const column = (chart, moment) => Math.max((chart.times ?? []).findLastIndex((time) => time <= moment), 0);

export const ClassicHeatmap = {
  PanelComponent: noted(Heatmap, column), supportedQueryTypes: ['TimeSeriesQuery'], createInitialOptions: () => ({}),
};
export const getPluginModule = () => ({
  kind: 'PluginModule', metadata: { name: 'classic-heatmap', version: '0.0.0' },
  spec: { plugins: [{ kind: 'Panel', spec: { name: 'ClassicHeatmap', display: { name: 'Classic heatmap' } } }] },
});
