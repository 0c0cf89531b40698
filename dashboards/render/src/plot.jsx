// Perses' time series, with notes over it and without the crowd of series that stay at 0: one stands for all of them.
import * as timeseries from '@perses-dev/timeseries-chart-plugin';
import React from 'react';
import { noted } from './notes.jsx';

const CROWD = 5;
const isZero = (series) => series.values.every(([, value]) => value === 0);

function thinned(results, isStacked) {
  const all = results.flatMap((result) => result.data?.series ?? []);
  const zeros = all.filter(isZero);
  if (all.length <= CROWD || zeros.length < 2) return results;
  const name = zeros.length === all.length ? `all ${zeros.length}: 0` : `${zeros.length} others: 0`;
  const one = { ...zeros[0], formattedName: name };
  const place = isStacked ? 0 : results.length - 1; // on a stack it would be the line on top
  return results.map((result, number) => {
    if (!result.data) return result;
    const series = result.data.series.filter((other) => !isZero(other));
    const whole = number !== place ? series : isStacked ? [one, ...series] : [...series, one];
    return { ...result, data: { ...result.data, series: whole } };
  });
}

function Thinned({ queryResults, ...others }) {
  const isStacked = Boolean(others.spec.visual?.stack);
  const results = React.useMemo(() => thinned(queryResults, isStacked), [queryResults, isStacked]);
  return <timeseries.TimeSeriesChart.PanelComponent queryResults={results} {...others} />;
}

export const TimeSeriesChart = { ...timeseries.TimeSeriesChart, PanelComponent: noted(Thinned) };
export const { getPluginModule } = timeseries;
