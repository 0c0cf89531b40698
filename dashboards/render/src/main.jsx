// Draws one dashboard: /dashboard.json on the page's own server, with the data of the Prometheus in ?prometheus=URL.
import { ChartsProvider, SnackbarProvider, generateChartsTheme, getTheme } from '@perses-dev/components';
import { ViewDashboard } from '@perses-dev/dashboards';
import { PluginRegistry, TimeRangeProvider, dynamicImportPluginLoader } from '@perses-dev/plugin-system';
import * as prometheus from '@perses-dev/prometheus-plugin';
import * as stat from '@perses-dev/stat-chart-plugin';
import * as timeseries from '@perses-dev/timeseries-chart-plugin';
import { CssBaseline, ThemeProvider } from '@mui/material';
import { QueryClient, QueryClientProvider } from '@tanstack/react-query';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';
import { QueryParamProvider } from 'use-query-params';
import { ReactRouter6Adapter } from 'use-query-params/adapters/react-router-6';
import * as heatmap from './heatmap.jsx';

const asked = new URLSearchParams(location.search);
const url = asked.get('prometheus');
const range = { start: new Date(Number(asked.get('from'))), end: new Date(Number(asked.get('to'))) };
const theme = getTheme('dark');
const loader = dynamicImportPluginLoader(
  [prometheus, timeseries, stat, heatmap].map((module) => ({ resource: module.getPluginModule(), importPlugin: async () => module })),
);
const source = {
  kind: 'GlobalDatasource', metadata: { name: 'prometheus' },
  spec: { default: true, plugin: { kind: 'PrometheusDatasource', spec: { directUrl: url, scrapeInterval: '10s' } } },
};
const sources = {
  getDatasource: async () => undefined, getGlobalDatasource: async () => source, listDatasources: async () => [],
  listGlobalDatasources: async () => [source], buildProxyUrl: () => url,
};
const queries = new QueryClient({ defaultOptions: { queries: { refetchOnWindowFocus: false, retry: 0 } } });

class Boundary extends React.Component {
  state = {};

  static getDerivedStateFromError(error) {
    return { error };
  }

  render() {
    return this.state.error ? <pre id="fatal">{String(this.state.error.stack)}</pre> : this.props.children;
  }
}

function Page({ dashboard }) {
  return (
    <PluginRegistry pluginLoader={loader} defaultPluginKinds={{ Panel: 'TimeSeriesChart', TimeSeriesQuery: 'PrometheusTimeSeriesQuery' }}>
      <TimeRangeProvider timeRange={range} refreshInterval="0s">
        <ViewDashboard dashboardResource={dashboard} datasourceApi={sources} isReadonly isVariableEnabled isDatasourceEnabled={false} />
      </TimeRangeProvider>
    </PluginRegistry>
  );
}

const dashboard = await (await fetch('/dashboard.json')).json();
createRoot(document.getElementById('root')).render(
  <Boundary>
    <ThemeProvider theme={theme}>
      <CssBaseline />
      <ChartsProvider chartsTheme={generateChartsTheme(theme, {})} enablePinning={false}>
        <SnackbarProvider>
          <QueryClientProvider client={queries}>
            <BrowserRouter>
              <QueryParamProvider adapter={ReactRouter6Adapter}><Page dashboard={dashboard} /></QueryParamProvider>
            </BrowserRouter>
          </QueryClientProvider>
        </SnackbarProvider>
      </ChartsProvider>
    </ThemeProvider>
  </Boundary>,
);
