// The playground: a conversation over /v1/chat/completions.

import { Answer, facts } from "./answer.js";
import { ask, events } from "./api.js";
import { by, make } from "./dom.js";

const turns = [];      // {role, content, element}
let running = null;    // the AbortController of the answer that is being made

export function startChat(onRefused, onTimeline) {
  const tell = { refused: onRefused, timeline: onTimeline };
  by("ask").addEventListener("submit", event => { event.preventDefault(); say(tell); });
  by("prompt").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say(tell);
  });
  by("stop-answer").addEventListener("click", () => running?.abort());
  by("again").addEventListener("click", () => { drop("assistant"); answer(tell); });
  by("clear").addEventListener("click", () => { while (turns.length) turns.pop().element.remove(); buttons(); by("prompt").focus(); });
}

function say(tell) {
  const content = by("prompt").value.trim();
  if (!content || running) return;
  by("hint")?.remove();
  by("prompt").value = "";
  add("user", content, make("div", { class: "message user" }, make("div", { class: "words" }, content)));
  answer(tell);
}

function add(role, content, element) {
  const turn = { role, content, element };
  turns.push(turn);
  by("log").append(element);
  scroll(true);
  return turn;
}

function drop(role) {
  while (turns.length && turns[turns.length - 1].role === role) turns.pop().element.remove();
}

function scroll(always) {
  const log = by("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function buttons() {
  by("send").disabled = by("clear").disabled = running !== null;
  by("stop-answer").disabled = running === null;
  by("again").disabled = running !== null || !turns.length;
  by("clear").disabled ||= !turns.length;
}

function order(name) {
  const system = by("system").value.trim(), stop = by("stop").value;
  const messages = turns.map(({ role, content }) => ({ role, content }));
  const body = { request_id: name, stream: true, stream_options: { include_usage: true } };
  body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  for (const field of ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "seed"]) {
    if (by(field).value !== "") body[field] = Number(by(field).value);
  }
  if (stop) body.stop = stop;
  if (by("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

async function answer(tell) {
  const name = "page-" + Array.from(crypto.getRandomValues(new Uint8Array(6)), byte => byte.toString(16).padStart(2, "0")).join("");
  const body = order(name), view = new Answer(), turn = add("assistant", "", view.element), begun = performance.now();
  const control = running = new AbortController();
  let first = null, reason = "stopped", usage = null;
  buttons();
  try {
    for await (const chunk of events(await ask("/v1/chat/completions", { body, signal: control.signal }))) {
      const choice = chunk.choices[0];
      usage = chunk.usage ?? usage;
      if (!choice) continue;
      const text = choice.delta?.content ?? "", entries = choice.logprobs?.content ?? [];
      if (first === null && (text || entries.length)) first = performance.now();
      view.add(text, entries);
      reason = choice.finish_reason ?? reason;
      scroll(false);
    }
  } catch (error) {
    if (!control.signal.aborted) { reason = "error"; tell.refused(error); view.element.append(make("p", { class: "error", role: "alert" }, error.message)); }
  }
  running = null;
  view.end();
  turn.content = view.text;
  const now = performance.now();
  if (reason !== "error") {
    view.facts.append(...facts(usage, ((first ?? now) - begun) / 1000, (now - begun) / 1000, reason));
    view.facts.append(make("button", { type: "button", onclick: () => tell.timeline(name) }, "Timeline"));
  }
  buttons();
  scroll(false);
}
