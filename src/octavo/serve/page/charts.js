// What has been seen so far: tokens a second, and which requests each step computed.

import { by, colour, count, pen, themed, time } from "./dom.js";

const POINTS = 120, STEPS = 400, COLUMN = 6, LANE = 7, BARS = 34, MOST_LANES = 32;
let paces = [], steps = [], before = null;

export function remember({ now, stats, steps: fresh, names }) {
  if (before && stats.output_tokens < before.tokens) { paces = []; steps = []; before = null; }  // another engine
  if (before && now > before.now) paces = [...paces, (stats.output_tokens - before.tokens) / (now - before.now)].slice(-POINTS);
  if (!before || now > before.now) before = { now, tokens: stats.output_tokens };
  const known = steps.length ? steps[steps.length - 1].number : 0;
  const more = fresh.filter(([number]) => number > known);
  steps = [...steps, ...more.map(([number, , ms, tokens, drawn, rows]) => ({ number, ms, tokens, drawn, rows: rows.map(row => names[row]) }))].slice(-STEPS);
}

export function drawPace() {
  const height = 60, [draw, width] = pen(by("pace"), height), most = Math.max(...paces, 1);
  draw.beginPath();
  paces.forEach((pace, at) => {
    const x = width - (paces.length - 1 - at) * width / (POINTS - 1), y = height - 4 - pace / most * (height - 10);
    if (at) draw.lineTo(x, y); else draw.moveTo(x, y);
  });
  draw.strokeStyle = themed("--mark");
  draw.lineWidth = 2;
  draw.stroke();
  by("pace-text").textContent = paces.length ? `now ${paces[paces.length - 1].toFixed(0)}, at most ${most.toFixed(0)}` : "";
}

export function drawBatch() {
  const shown = steps.slice(-Math.max(1, Math.floor(by("batch").clientWidth / COLUMN)));
  const lanes = [...new Set(shown.flatMap(step => step.rows))].slice(-MOST_LANES);  // a lane for each request, in order of appearance
  const height = BARS + 6 + LANE * Math.max(lanes.length, 1), [draw, width] = pen(by("batch"), height);
  const most = Math.max(...shown.map(step => step.tokens), 1), left = width - shown.length * COLUMN;
  shown.forEach((step, at) => {
    const x = left + at * COLUMN, high = Math.max(1, step.tokens / most * (BARS - 4));
    draw.fillStyle = step.tokens > step.rows.length ? themed("--mark") : themed("--cache");
    draw.fillRect(x, BARS - high, COLUMN - 1, high);
    for (const name of step.rows) {
      draw.fillStyle = colour(name);
      draw.fillRect(x, BARS + 4 + LANE * lanes.indexOf(name), COLUMN - 1, LANE - 1);
    }
  });
  const last = shown[shown.length - 1];
  by("batch-text").textContent = last
    ? `One column a step, one lane a request; above, the step's tokens (at most ${count(most)} here; blue: with prefill). Step ${count(last.number)}: ${last.rows.length} sequences, ${count(last.tokens)} tokens in, ${count(last.drawn)} out, ${time(last.ms / 1000)}.`
    : "No step yet.";
}
