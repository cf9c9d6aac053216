// Why one request took as long as it did: GET /v1/requests/{id}/explain.

import { ask } from "./api.js";
import { by, make, share, time } from "./dom.js";

const COLOURS = { queued: "#d9822b", pages: "#c0392b", prefix: "#8e6bbf", prefill: "#2f7dd1", decode: "#2a9d5c", preempted: "#d6336c" };

export async function explain(name) {
  const panel = by("explained");
  panel.hidden = false;
  panel.replaceChildren(make("h2", {}, `Timeline of ${name}`), make("p", { class: "soft" }, "asking"));
  panel.scrollIntoView({ block: "nearest" });
  try {
    const { requests } = await (await ask(`/v1/requests/${encodeURIComponent(name)}/explain`)).json();
    panel.replaceChildren(make("h2", {}, `Timeline of ${name}`), ...requests.flatMap(told));
  } catch (error) {
    panel.replaceChildren(make("h2", {}, `Timeline of ${name}`), make("p", { class: "error" }, error.message));
  }
  panel.append(make("button", { type: "button", onclick: () => { panel.hidden = true; } }, "Close"));
  panel.scrollIntoView({ block: "nearest" });
}

function told({ request, wall_s, ended, finish_reason, ttft_s, longest_gap_s, prompt_tokens, cached_tokens, output_tokens, causes }) {
  const state = ended ? `ended (${finish_reason})` : "still running";
  const facts = [`${time(wall_s)} in all, ${state}`, `first token after ${time(ttft_s)}`, `longest gap ${time(longest_gap_s)}`, `${prompt_tokens} prompt tokens, ${cached_tokens} cached, ${output_tokens} out`];
  const rows = causes.map(({ name, seconds, detail }) => make("tr", {}, make("td", {}, swatch(name), name), make("td", {}, time(seconds)), make("td", {}, share(seconds / wall_s)), make("td", { class: "left" }, detail)));
  return [make("p", { class: "soft" }, `${request}: ${facts.join("; ")}`), bar(causes, wall_s), make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, ...rows)))];
}

function swatch(name) {
  const made = make("span", { class: "swatch" });
  made.style.background = COLOURS[name] ?? "#808890";
  return made;
}

function bar(causes, whole) {
  const made = make("div", { class: "whole", "aria-hidden": "true" });
  for (const { name, seconds } of causes) {
    const part = make("span");
    part.style.background = COLOURS[name] ?? "#808890";
    part.style.width = 100 * seconds / whole + "%";
    made.append(part);
  }
  return made;
}
