import react from '@vitejs/plugin-react';
import { defineConfig } from 'vite';

export default defineConfig({
  plugins: [react()],
  define: { global: 'globalThis', 'process.env': {} },
  build: { minify: false, sourcemap: false, chunkSizeWarningLimit: 99999 },
  resolve: { dedupe: ['react', 'react-dom', '@mui/material', '@emotion/react', '@tanstack/react-query', 'echarts'] },
});
