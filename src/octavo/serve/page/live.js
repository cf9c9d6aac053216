// The live view: one stream of snapshots (GET /v1/live) while it is on the screen, drawn by the panels.

import { ask, events } from "./api.js";
import { drawBatch, drawPace, remember } from "./charts.js";
import { by, colour, count, make, share, time } from "./dom.js";
import { drawPages, drawTree } from "./pages.js";
import { explain } from "./timeline.js";

const RETRY_MS = 2000;
let control = null, last = null, paused = false;

export function startLive(onRefused) {
  const settle = () => { if (wanted()) { if (!control) watch(onRefused); } else control?.abort(); };
  for (const event of ["viewed", "resize"]) window.addEventListener(event, () => { settle(); redraw(); });
  document.addEventListener("visibilitychange", settle);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  by("pause").addEventListener("click", () => {
    paused = !paused;
    by("pause").setAttribute("aria-pressed", String(paused));
    by("pause").textContent = paused ? "Go on" : "Pause";
    settle();
  });
  settle();
}

const wanted = () => !paused && !document.hidden && by("engine").offsetParent !== null;

async function watch(onRefused) {
  const own = control = new AbortController();
  let wait = RETRY_MS;
  try {
    by("link").textContent = "connecting";
    for await (const seen of events(await ask("/v1/live", { signal: own.signal }))) {
      by("link").textContent = seen.engine ? "live, four times a second" : "the engine is being started again";
      if (!seen.engine) continue;
      last = seen;
      remember(seen);
      redraw();
    }
    by("link").textContent = "the server has ended the stream";
  } catch (error) {
    by("link").textContent = own.signal.aborted ? "paused" : error.message;
    if (error.status === 401) { wait = null; onRefused(error); }
  }
  control = null;
  if (own.signal.aborted) wait = wanted() ? 0 : null;  // it may be wanted again already
  if (wait !== null) setTimeout(() => { if (wanted() && !control) watch(onRefused); }, wait);
}

export function redraw() {
  if (!last || by("engine").offsetParent === null) return;
  drawNumbers(last);
  drawPace();
  drawBatch();
  drawRows(last);
  drawPages(last);
  drawTree(last);
}

function drawNumbers({ stats, pages }) {
  const used = 1 - stats.pages_free / pages.total;
  const hits = stats.prefix_queries_tokens ? stats.prefix_hit_tokens / stats.prefix_queries_tokens : 0;
  const shown = {
    "running": `${count(stats.num_running)} of ${count(stats.max_running)}`,
    "waiting": count(stats.num_waiting),
    "steps": count(stats.steps),
    "last step": time(stats.step_seconds),
    "token gap, median": time(stats.token_gap_p50_s),
    "token gap, p99": time(stats.token_gap_p99_s),
    "pages in use": share(used),
    "from the cache": share(hits),
    "preemptions": count(stats.preemptions),
    "output tokens": count(stats.output_tokens),
  };
  by("numbers").replaceChildren(...Object.entries(shown).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function drawRows({ names, rows, ended }) {
  const live = rows.map(([name, choice, state, known, resident, outputs, cached, reason, waited]) => {
    const why = reason && reason !== "none" ? `${state} (${reason})` : state;
    const tokens = known === null ? "" : `${count(resident)} of ${count(known)}`;
    return line(names[name], choice, why, tokens, count(outputs), count(cached), time(waited));
  });
  const over = ended.map(([name, first, , prompt, outputs, cached]) =>
    line(names[name], 0, "ended", count(prompt + outputs), count(outputs), count(cached), first === null ? "" : `first token ${time(first)}`));
  const none = make("tr", {}, make("td", { colspan: "6" }, "No request yet."));
  const focused = document.activeElement?.dataset?.request;  // the table is made anew: keep the keyboard's place
  by("rows").replaceChildren(...(live.length + over.length ? [...live, ...over] : [none]));
  if (focused) by("rows").querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function line(name, choice, ...cells) {
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = colour(name);
  const shown = (name ?? "another key's") + (choice ? ` #${choice}` : "");
  const first = name === null ? make("span", {}, shown) : make("button", { type: "button", "data-request": name + choice, title: "Its timeline", onclick: () => explain(name) }, shown.length > 24 ? shown.slice(0, 23) + "…" : shown);
  return make("tr", {}, make("td", {}, swatch, first), ...cells.map(cell => make("td", {}, cell)));
}
