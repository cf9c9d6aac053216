// Elements, numbers as people read them, and one colour for each request. Text only ever becomes text nodes.

export const by = id => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const count = value => value === null || value === undefined ? "" : Math.round(value).toLocaleString("en");
export const share = value => (100 * value).toFixed(value >= 0.9995 || value < 0.1 ? 2 : 1) + "%";

export function time(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return (1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0) + " ms";
  return seconds.toFixed(seconds < 100 ? 2 : 0) + " s";
}

const COLOURS = ["#2f7dd1", "#d9822b", "#2a9d5c", "#c0392b", "#8e6bbf", "#1793a5", "#b59a00", "#d6336c", "#6a5acd", "#7a5548"];

const given = new Map();  // request -> number, in the order in which they were first seen
let next = 0;

export function colour(name) {  // the same for a request wherever it is drawn
  if (name === null || name === undefined) return "#808890";
  if (!given.has(name)) given.set(name, next++);
  if (given.size > 1000) given.delete(given.keys().next().value);
  return COLOURS[given.get(name) % COLOURS.length];
}

export const themed = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function pen(canvas, height) {  // a clean surface in CSS pixels, and its width
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const drawn = canvas.getContext("2d");
  drawn.scale(ratio, ratio);
  return [drawn, width];
}
