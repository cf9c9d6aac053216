// The page pool and the prefix tree. A page's colour is its first owner's; its pattern says who else has it.

import { by, colour, count, make, pen, themed } from "./dom.js";

const CELL = 9, NODE = 12;
const LEGEND = { free: "free", cache: "cache alone", own: "one request", kept: "and the cache", shared: "several requests" };

export function drawPages({ pages, rows, names, page_size }) {
  const canvas = by("pages"), across = Math.max(1, Math.floor(canvas.clientWidth / CELL));
  const shown = pages.runs.reduce((sum, [, length]) => sum + length, 0);
  const [draw] = pen(canvas, Math.ceil(shown / across) * CELL + 2);
  const tally = { free: 0, cache: 0, own: 0, kept: 0, shared: 0 };
  let page = 0;
  for (const [code, length] of pages.runs) {
    const kind = code < 2 ? ["free", "cache"][code] : ["own", "kept", "shared"][(code - 2) % 3];
    const row = Math.floor((code - 2) / 3) - 1;
    const fill = code < 2 ? themed(`--${kind}`) : colour(row < 0 ? null : names[rows[row][0]]);
    tally[kind] += length;
    for (const end = page + length; page < end; page++) cell(draw, page % across * CELL + 1, Math.floor(page / across) * CELL + 1, fill, kind);
  }
  by("legend").replaceChildren(...Object.entries(LEGEND).map(([kind, text]) => make("li", {}, make("span", { class: `swatch ${kind}` }), `${text} ${count(tally[kind])}`)));
  const part = shown < pages.total ? `the first ${count(shown)} of ${count(pages.total)} pages` : `${count(shown)} pages`;
  by("pages-text").textContent = `Each cell is a page of ${page_size} tokens; ${part}. Colours are the requests' of the list above.`;
}

function cell(draw, x, y, fill, kind) {
  const size = CELL - 1;
  draw.fillStyle = fill;
  draw.fillRect(x, y, size, size);
  draw.fillStyle = "#fff";
  if (kind === "kept") draw.fillRect(x + size / 2 - 1, y + size / 2 - 1, 2, 2);
  if (kind !== "shared") return;
  for (let at = 0; at < size; at += 2) draw.fillRect(x + at, y + size - 1 - at, 2, 1);
}

export function drawTree({ tree }) {
  by("tree-panel").hidden = !tree.length;
  if (!tree.length) return;
  let lane = -1, end = Infinity;
  const placed = tree.map(([start, columns, locks]) => {
    if (start < end) lane += 1;  // a branch begins; else it goes on where its parent ends
    end = start + columns;
    return { start, columns, locks, lane };
  });
  const most = Math.max(...placed.map(node => node.start + node.columns));
  const [draw, width] = pen(by("tree"), (lane + 1) * NODE + 4), unit = (width - 2) / most;
  for (const node of placed) {
    draw.fillStyle = themed(node.locks ? "--mark" : "--cache");
    draw.fillRect(1 + node.start * unit, 2 + node.lane * NODE, Math.max(node.columns * unit - 1, 1), NODE - 2);
  }
  by("tree-text").textContent = `${count(tree.length)} stretches of cached text, up to ${count(most)} pages long; what branches off shares all that stands before it. In colour: in use.`;
}
