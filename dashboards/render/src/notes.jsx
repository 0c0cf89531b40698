// The notes (Grafana's annotations), which this version of Perses has not: lines over a panel, and a strip under the title that says
// what each was and when.
import { Stack, Typography } from '@mui/material';
import * as echarts from 'echarts/core';
import React from 'react';

const SHOWN_MAX = 48;
const LOOK_AGAIN_MS = 500;
const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);
const milliseconds = (chart, moment) => moment;

export const Notes = React.createContext([]);

// Where each note stands in the panel's own pixels; nothing until its chart has an axis.
function places(holder, notes, onAxis) {
  const shown = holder?.querySelector('[_echarts_instance_]');
  const chart = shown && echarts.getInstanceByDom(shown);
  const grid = chart?.getModel().getComponent('grid')?.coordinateSystem?.getRect();
  if (!grid || !chart.getModel().getComponent('xAxis')?.axis) return [];
  const [outer, inner] = [holder.getBoundingClientRect(), shown.getBoundingClientRect()];
  const pixel = (seconds) => {
    const x = chart.convertToPixel({ xAxisIndex: 0 }, onAxis(chart, seconds * 1000));
    return Math.min(Math.max(x, grid.x), grid.x + grid.width);
  };
  return notes.map(({ at, until, colour, isMark }) => ({
    left: inner.left - outer.left + pixel(at), top: inner.top - outer.top + grid.y, width: pixel(until) - pixel(at), height: grid.height,
    background: `linear-gradient(${colour}99, ${colour}99) bottom / 100% 4px no-repeat`, borderLeft: `1px ${isMark ? 'solid' : 'dashed'} ${colour}`,
  }));
}

export function noted(Chart, onAxis = milliseconds) {
  return function Noted(props) {
    const holder = React.useRef(null);
    const notes = React.useContext(Notes);
    const [lines, setLines] = React.useState([]);
    React.useEffect(() => {
      const look = () => {
        const now = places(holder.current, notes, onAxis);
        setLines((before) => (JSON.stringify(before) === JSON.stringify(now) ? before : now));
      };
      const timer = setInterval(look, LOOK_AGAIN_MS);
      return () => clearInterval(timer);
    }, [notes]);
    const chart = React.useMemo(() => <Chart {...props} />, [props]); // lines are no reason to draw it again
    return (
      <div ref={holder} style={{ position: 'relative', height: '100%' }}>
        {chart}
        {lines.map((line, number) => <i key={number} className="note" style={{ position: 'absolute', pointerEvents: 'none', ...line }} />)}
      </div>
    );
  };
}

export function Strip({ title, caption, notes }) {
  const more = notes.length - SHOWN_MAX;
  return (
    <Stack spacing={0.5} sx={{ width: '100%' }}>
      <Typography variant="h2">{title}</Typography>
      <Typography variant="body2" color="text.secondary">{caption}</Typography>
      <div id="strip" style={{ display: 'flex', flexWrap: 'wrap', columnGap: 16, rowGap: 2, fontSize: 13 }}>
        {notes.slice(0, SHOWN_MAX).map((note, number) => (
          <span key={number} style={{ borderLeft: `3px solid ${note.colour}`, paddingLeft: 6, whiteSpace: 'nowrap' }}>
            {clock(note.at)} <b>{note.name}</b> {note.text}
          </span>
        ))}
        {more > 0 && <span>and {more} more</span>}
      </div>
    </Stack>
  );
}
