// Makes elements, and writes numbers. Texts from other nodes only ever become text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element with attributes and children. Strings among the children become text. */
export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Returns an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text if it differs, so that a reader's selection survives. */
export function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

const known = new Map();

/** Fills an element anew if what it is made from has changed. */
export function fill(id, source, make) {
  const text = JSON.stringify(source);
  if (known.get(id) === text) return;
  known.set(id, text);
  byId(id).replaceChildren(...make());
}

// It takes far longer to make a format than to use it.
const formats = [0, 1, 2, 3, 4].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);

/** Returns a number for people, with at most four digits after the point, or a dash for null. */
export function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : formats[digits].format(value);
}

/** Returns a rate of bytes in bits: "12 Mbit/s". */
export function speed(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const bits = 8 * bytes;
  const [unit, size] = bits >= 1e9 ? ["Gbit/s", 1e9] : bits >= 1e6 ? ["Mbit/s", 1e6] : ["kbit/s", 1e3];
  const amount = bits / size;
  return `${number(amount, amount < 10 ? 1 : 0)} ${unit}`;
}

/** Returns an amount of memory: "24 GB". */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  return bytes >= 1e9 ? `${number(bytes / 1e9, 1)} GB` : `${number(bytes / 1e6)} MB`;
}

/** Returns a duration in milliseconds. */
export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return `${number(1e3 * seconds, seconds < 0.01 ? 1 : 0)} ms`;
}

/** Returns a length of time in its two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const all = Math.round(seconds);
  const [days, hours, minutes] = [all / 86400, (all / 3600) % 24, (all / 60) % 60].map(Math.floor);
  if (days) return `${number(days)} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
}

/** Returns the local time of day, with the date if it is not today. */
export function clock(seconds) {
  const date = new Date(1e3 * seconds);
  const time = date.toLocaleTimeString("en-GB");
  if (date.toDateString() === new Date().toDateString()) return time;
  return `${date.toLocaleDateString("en-CA")} ${time}`;
}

const HAPPENED = {
  there: "was there at the start",
  came: "came",
  left: "left",
  lost: "was lost",
  gone: "is gone",
  elected: "this node was elected leader",
  recut: "the model was cut anew",
  returned: "the run went back to this iteration",
  checkpoint: "checkpoint",
};

/** Returns what happened, in a sentence. */
export function happened({ kind, name, stage, reason, cost_s: cost }) {
  const who = name ? `${name} (stage ${stage}) ` : "";
  const why = reason ? `: ${reason}` : "";
  const delay = cost === null ? "" : `; it cost ${number(cost, 1)} s`;
  return `${who}${HAPPENED[kind] ?? kind}${why}${delay}`;
}

const GOOD = ["training", "aggregating", "finished"];
const BAD = ["lost", "stopped", "waiting"];

/** Returns the class that colours a state. */
export function tone(state) {
  if (GOOD.includes(state)) return "good";
  return BAD.includes(state) ? "bad" : state ? "warn" : "";
}
