// One answer on the page: its words, each token with what else it could have been, and what it took.

import { by, make, share, time } from "./dom.js";

const UNSURE = Math.log(0.5);

export class Answer {
  constructor() {
    this.words = make("div", { class: "words", tabindex: "0", "aria-label": "Answer; arrow keys walk through its tokens" });
    this.facts = make("div", { class: "facts" });
    this.element = make("div", { class: "message assistant" }, this.words, this.facts);
    this.text = "";
    this.count = 0;
    this.shown = 0;      // characters of the text that are on the page
    this.waiting = [];   // tokens whose text is not decided yet
    this.decoder = new TextDecoder("utf-8");
    this.spans = [];
    this.words.addEventListener("mouseover", event => this.point(event.target));
    this.words.addEventListener("mouseleave", hide);
    this.words.addEventListener("blur", () => this.choose(null));
    this.words.addEventListener("keydown", event => this.walk(event));
  }

  add(text, entries) {  // what a chunk brings; text may lag behind its tokens
    this.text += text;
    for (const entry of entries) {
      const piece = this.decoder.decode(new Uint8Array(entry.bytes), { stream: true });
      this.waiting.push([piece, entry]);
    }
    this.place(false);
  }

  end() { this.place(true); }

  place(all) {
    while (this.waiting.length) {
      let [piece, entry] = this.waiting[0];
      const left = this.text.slice(this.shown);
      if (this.shown === 0 && !left.startsWith(piece)) piece = piece.trimStart();  // tokenizers that begin with a space
      if (left.startsWith(piece)) this.put(piece, entry);
      else if (piece.startsWith(left) && !all) return;
      this.waiting.shift();  // a token that is no text: an end, or behind a stop
    }
    if (all || !this.spans.length) this.put(this.text.slice(this.shown), null);
  }

  put(piece, entry) {
    if (!piece) return;
    this.shown += piece.length;
    if (entry === null) { this.words.append(piece); return; }
    const span = make("span", { class: entry.logprob < UNSURE ? "token unsure" : "token" }, piece);
    span.entry = entry;
    this.spans.push(span);
    this.words.append(span);
  }

  point(target) {
    if (target.entry) show(target); else hide();
  }

  choose(span) {
    this.spans.forEach(each => each.classList.toggle("chosen", each === span));
    if (span) show(span); else hide();
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (step === undefined || !this.spans.length) return;
    event.preventDefault();
    const at = this.spans.findIndex(span => span.classList.contains("chosen"));
    this.choose(this.spans[Math.min(Math.max(at + step, 0), this.spans.length - 1)]);
  }
}

function show(span) {
  const { token, logprob, top_logprobs } = span.entry, tip = by("tip");
  const lines = top_logprobs.map(other => `${share(Math.exp(other.logprob))}  ${JSON.stringify(other.token)}${other.token === token ? "  ←" : ""}`);
  const taken = top_logprobs.some(other => other.token === token) ? [] : [`${share(Math.exp(logprob))}  ${JSON.stringify(token)}  ←`];
  tip.textContent = [...lines, ...taken].join("\n");
  tip.hidden = false;
  const box = span.getBoundingClientRect(), below = box.bottom + tip.offsetHeight + 6 < innerHeight;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = (below ? box.bottom + 4 : box.top - tip.offsetHeight - 4) + "px";
}

function hide() { by("tip").hidden = true; }

export function facts(usage, first, whole, reason) {  // of a finished answer, in words
  const rest = whole - first, made = usage?.completion_tokens ?? 0;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const told = usage ? [`${usage.prompt_tokens} prompt tokens, ${cached} cached`, `${made} tokens`] : [];
  told.push(`first token ${time(first)}`);
  if (made > 1 && rest > 0) told.push(`${((made - 1) / rest).toFixed(1)} tokens/s`);
  told.push(`ended: ${reason}`);
  return told.map(text => make("span", {}, text));
}
