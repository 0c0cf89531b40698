// Heatmap of a classic histogram: Perses' own draws native ones only. One series a bucket, cumulative in `le`.
import * as echarts from 'echarts';
import React from 'react';

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

function PanelComponent({ contentDimensions, queryResults }) {
  const place = React.useRef(null);
  const series = (queryResults ?? []).flatMap((result) => result.data?.series ?? []);
  React.useEffect(() => {
    if (!place.current || !series.length) return undefined;
    const buckets = [...series].sort((one, other) => number(bound(one)) - number(bound(other)));
    const times = [...new Set(buckets.flatMap((bucket) => bucket.values.map(([time]) => time)))].sort((one, other) => one - other);
    const data = cells(buckets, times);
    const chart = echarts.init(place.current, 'dark', { renderer: 'canvas' });
    chart.setOption({
      backgroundColor: 'transparent', grid: { left: 50, right: 10, top: 8, bottom: 24 },
      xAxis: { type: 'category', data: times.map((time) => new Date(time).toISOString().slice(11, 16)) },
      yAxis: { type: 'category', data: buckets.map((bucket) => `≤ ${bound(bucket)}`) },
      visualMap: {
        show: false, min: 0, max: Math.max(...data.map((cell) => cell[2]), 1e-9),
        inRange: { color: ['#10141f', '#1f3a6e', '#2a7f9e', '#6fbf73', '#f2d64b'] },
      },
      series: [{ type: 'heatmap', data, progressive: 0, animation: false }],
    });
    return () => chart.dispose();
  }, [JSON.stringify(contentDimensions), series]);
  if (!series.length) return <div>No data</div>;
  return <div ref={place} style={{ width: contentDimensions?.width, height: contentDimensions?.height }} />;
}

export const ClassicHeatmap = { PanelComponent, supportedQueryTypes: ['TimeSeriesQuery'], createInitialOptions: () => ({}) };
export const getPluginModule = () => ({
  kind: 'PluginModule', metadata: { name: 'classic-heatmap', version: '0.0.0' },
  spec: { plugins: [{ kind: 'Panel', spec: { name: 'ClassicHeatmap', display: { name: 'Classic heatmap' } } }] },
});
