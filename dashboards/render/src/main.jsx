// Draws one dashboard: /page.json on the page's own server names its Prometheus and time, and holds the dashboard and its notes.
import { ChartsProvider, SnackbarProvider, generateChartsTheme, getTheme } from '@perses-dev/components';
import { ViewDashboard } from '@perses-dev/dashboards';
import { PluginRegistry, dynamicImportPluginLoader } from '@perses-dev/plugin-system';
import * as prometheus from '@perses-dev/prometheus-plugin';
import * as stat from '@perses-dev/stat-chart-plugin';
import { CssBaseline, GlobalStyles, ThemeProvider } from '@mui/material';
import { QueryClient, QueryClientProvider } from '@tanstack/react-query';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { BrowserRouter } from 'react-router-dom';
import { QueryParamProvider } from 'use-query-params';
import { ReactRouter6Adapter } from 'use-query-params/adapters/react-router-6';
import * as heatmap from './heatmap.jsx';
import { Notes, Strip } from './notes.jsx';
import * as instant from './instant.jsx';
import * as plot from './plot.jsx';

const given = await (await fetch('/page.json')).json();
const theme = getTheme('dark');
const loader = dynamicImportPluginLoader(
  [prometheus, stat, instant, plot, heatmap].map((module) => ({ resource: module.getPluginModule(), importPlugin: async () => module })),
);
const source = {
  kind: 'GlobalDatasource', metadata: { name: 'prometheus' },
  spec: { default: true, plugin: { kind: 'PrometheusDatasource', spec: { directUrl: given.prometheus, scrapeInterval: given.scrape } } },
};
const sources = {
  getDatasource: async () => undefined, getGlobalDatasource: async () => source, listDatasources: async () => [],
  listGlobalDatasources: async () => [source], buildProxyUrl: () => given.prometheus,
};
const queries = new QueryClient({ defaultOptions: { queries: { refetchOnWindowFocus: false, retry: 0 } } });
const colours = ['#73bf69', '#f2cc0c', '#5794f2', '#ff9830', '#f2495c', '#b877d9', '#8ab8ff', '#c0d8ff', '#e0b400', '#37872d', '#fa6400', '#1f60c4'];
// Nobody presses anything in a picture, and titles and legends are as small as Grafana's.
const looks = {
  '*': { animation: 'none !important', transition: 'none !important' },
  '[data-testid="dashboard-toolbar"] button, [data-testid="dashboard-toolbar"] > div:nth-of-type(2) > div:last-of-type': { display: 'none' },
  '[data-testid="panel"]': { '--panel-header-height': '18px' },
  '[data-testid="panel"] header .MuiTypography-root': { fontSize: 14, lineHeight: '20px !important' },
  '[data-testid="panel"] ul': { overflow: 'hidden !important', position: 'relative', top: 3 },
  '[data-testid="panel"] ul .MuiTypography-root': { fontSize: 11, lineHeight: '12px' },
  '[data-testid="panel"] ul .MuiListItemText-root': { margin: 0 },
};

class Boundary extends React.Component {
  state = {};

  static getDerivedStateFromError(error) {
    return { error };
  }

  render() {
    return this.state.error ? <pre id="fatal">{String(this.state.error.stack)}</pre> : this.props.children;
  }
}

function Page() {
  return (
    <PluginRegistry pluginLoader={loader} defaultPluginKinds={{ Panel: 'TimeSeriesChart', TimeSeriesQuery: 'PrometheusTimeSeriesQuery' }}>
      <Notes.Provider value={given.notes}>
        <ViewDashboard
          dashboardResource={given.dashboard} datasourceApi={sources} isReadonly isVariableEnabled isDatasourceEnabled={false}
          dashboardTitleComponent={<Strip title={given.dashboard.spec.display.name} caption={given.caption} notes={given.notes} />}
        />
      </Notes.Provider>
    </PluginRegistry>
  );
}

createRoot(document.getElementById('root')).render(
  <Boundary>
    <ThemeProvider theme={theme}>
      <CssBaseline />
      <GlobalStyles styles={looks} />
      <ChartsProvider chartsTheme={generateChartsTheme(theme, { echartsTheme: { color: colours } })} enablePinning={false}>
        <SnackbarProvider>
          <QueryClientProvider client={queries}>
            <BrowserRouter>
              <QueryParamProvider adapter={ReactRouter6Adapter}><Page /></QueryParamProvider>
            </BrowserRouter>
          </QueryClientProvider>
        </SnackbarProvider>
      </ChartsProvider>
    </ThemeProvider>
  </Boundary>,
);
