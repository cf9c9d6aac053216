// What holds the page together: views, theme, key, and what is served here.

import { ask, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { by } from "./dom.js";
import { redraw, startLive } from "./live.js";
import { explain } from "./timeline.js";

const root = document.documentElement, themes = ["auto", "light", "dark"], views = ["chat", "engine"];

function view(name) {
  root.dataset.view = name;
  for (const each of views) {
    by(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    by(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  window.dispatchEvent(new Event("viewed"));
}

function theme(name) {
  if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
  by("theme").textContent = `Theme: ${name}`;
  try { localStorage.setItem("octavo-theme", name); } catch { /* storage may be off */ }
  redraw();
}

function refused(error) {
  if (error.status === 401) { by("key-form").hidden = false; by("key").focus(); }
}

async function greet() {
  try {
    const { data: [card] } = await (await ask("/v1/models")).json();
    by("model").textContent = `${card.id}, ${card.max_model_len.toLocaleString("en")} tokens`;
  } catch (error) {
    by("model").textContent = error.message;
    refused(error);
  }
}

let stored = "auto";
try { stored = localStorage.getItem("octavo-theme") ?? "auto"; } catch { /* storage may be off */ }
theme(themes.includes(stored) ? stored : "auto");
view("chat");
by("theme").addEventListener("click", () => theme(themes[(themes.indexOf(root.dataset.theme ?? "auto") + 1) % 3]));
for (const each of views) {
  by(`tab-${each}`).addEventListener("click", () => view(each));
  by(`tab-${each}`).addEventListener("keydown", event => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = views.find(name => name !== each);
    view(other);
    by(`tab-${other}`).focus();
  });
}
by("key-form").addEventListener("submit", event => {
  event.preventDefault();
  useKey(by("key").value);
  by("key-form").hidden = true;
  greet();
  window.dispatchEvent(new Event("viewed"));
});
startChat(refused, name => { view("engine"); explain(name); });
startLive(refused);
greet();
