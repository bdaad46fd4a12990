// Draws a curve over time, and tells the value below the pointer.

import { byId, clock, number, setText, svg } from "./elements.js";

const HEIGHT = 176;
const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;

/** A curve of one column of the steps: [iteration, time, loss, tokens a second]. */
export class Chart {
  constructor(name, column, digits) {
    this.name = name;
    this.column = column;
    this.digits = digits;
    this.points = [];
    this.element = byId(`${name}-chart`);
    this.element.addEventListener("pointermove", (event) => this.pointAt(event.offsetX));
    this.element.addEventListener("pointerleave", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Shows these steps. */
  show(steps) {
    this.points = steps.filter((step) => step[this.column] !== null);
    this.draw();
  }

  draw(pointed = null) {
    const width = this.element.clientWidth || 320;
    this.element.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const { points, column } = this;
    if (!points.length) {
      const text = svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet");
      this.element.replaceChildren(text);
      setText(`${this.name}-summary`, "");
      return;
    }
    const values = points.map((step) => step[column]);
    const [low, high] = bounds(values);
    const begin = points[0][1];
    const end = Math.max(points[points.length - 1][1], begin + 1);
    this.x = (time) => LEFT + ((time - begin) / (end - begin)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const tick of ticks(low, high)) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      const label = tick >= 1e4 ? `${number(tick / 1e3, 0)}k` : number(tick, decimals(high - low));
      parts.push(svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, label));
    }
    parts.push(svg("text", { x: LEFT, y: HEIGHT - 5 }, clock(begin)));
    parts.push(svg("text", { x: width - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, clock(end)));
    const path = points.map((step) => `${this.x(step[1]).toFixed(1)},${y(step[column]).toFixed(1)}`);
    parts.push(svg("polyline", { class: "curve", points: path.join(" ") }));
    const shown = pointed ?? points[points.length - 1];
    const place = { cx: this.x(shown[1]), cy: y(shown[column]), r: 3.5 };
    if (pointed) {
      parts.push(svg("line", { class: "cursor", x1: place.cx, x2: place.cx, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    parts.push(svg("circle", { class: "point", ...place }));
    this.element.replaceChildren(...parts);
    const said = `${number(shown[column], this.digits)} at iteration ${number(shown[0])}, ${clock(shown[1])}`;
    const range = `; from ${number(Math.min(...values), this.digits)} to ${number(Math.max(...values), this.digits)}`;
    setText(`${this.name}-summary`, pointed ? said : said + range);
  }

  pointAt(x) {
    if (!this.points.length) return;
    const distance = (step) => Math.abs(this.x(step[1]) - x);
    this.draw(this.points.reduce((best, step) => (distance(step) < distance(best) ? step : best)));
  }
}

function bounds(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

const decimals = (range) => Math.max(0, Math.min(4, Math.ceil(1 - Math.log10(range))));
