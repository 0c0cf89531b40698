// A stat of one moment: Perses' own looks back over the whole range and would show each series there ever was.
import * as stat from '@perses-dev/stat-chart-plugin';

export const InstantStat = { ...stat.StatChart, queryOptions: { mode: 'instant' } };
export const getPluginModule = () => ({
  kind: 'PluginModule', metadata: { name: 'instant-stat', version: '0.0.0' },
  spec: { plugins: [{ kind: 'Panel', spec: { name: 'InstantStat', display: { name: 'Instant stat' } } }] },
});
