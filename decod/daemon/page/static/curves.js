// The curves of a run, drawn by uPlot (MIT licence, in uPlot.js): loss and throughput over
// iterations, tokens or time, with what happened to the run. Both zoom and point together.

import { byId, clock, happened, number, setText } from "./elements.js";

const HEIGHT = 230;
const NEAR_PX = 6;
const MARKS_MAX = 300;
const TONES = { lost: "--bad", elected: "--warn", returned: "--warn", recut: "--accent", checkpoint: "--line" };

/** Each way along the run: the place of a step or an event, and its name. */
const WAYS = {
  iteration: { of: ([iteration]) => iteration, label: "Iteration", show: (value) => number(value) },
  tokens: { of: ([iteration], perIteration) => iteration * perIteration, label: "Tokens", show: (value) => number(value) },
  time: { of: ([, time]) => time, label: "Time", show: (value) => clock(value) },
};

const CURVES = {
  loss: { title: "Loss", columns: [["Loss", "--accent"], ["Held-out loss", "--good"]], digits: 4 },
  rate: { title: "Throughput", columns: [["Tokens/s", "--accent"]], digits: 0 },
};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

/** Both charts, and the controls above them. */
export class Curves {
  constructor() {
    this.way = "iteration";
    this.isLog = false;
    this.isZoomed = false;
    this.history = { steps: [], events: [], held_out: [] };
    this.tokens = 1;
    this.charts = {};
    for (const input of document.querySelectorAll("input[name=way]")) {
      input.addEventListener("change", () => this.choose({ way: input.value }));
    }
    byId("log").addEventListener("change", (event) => this.choose({ isLog: event.target.checked }));
    byId("whole").addEventListener("click", () => this.zoomOut());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
    new ResizeObserver(() => this.resize()).observe(byId("charts"));
  }

  /** Shows a history; `tokens` is the number of tokens of an iteration. */
  show(history, tokens) {
    const isSame = this.shown === `${history.generation} ${history.steps.length} ${history.held_out.length}`;
    this.shown = `${history.generation} ${history.steps.length} ${history.held_out.length}`;
    if (isSame && this.tokens === tokens) return;
    this.history = history;
    this.tokens = tokens;
    if (!this.charts.loss) this.rebuild();
    else this.fill();
  }

  choose(choice) {
    Object.assign(this, choice, { isZoomed: false });
    this.rebuild();
  }

  zoomOut() {
    this.isZoomed = false;
    this.fill();
  }

  place(step) {
    return WAYS[this.way].of(step, this.tokens);
  }

  /** Returns the columns of a chart, all of them over the same places. */
  data(name) {
    const { steps, held_out: heldOut } = this.history;
    const rows = new Map(steps.map((step) => [step[0], [this.place(step), step[name === "loss" ? 2 : 3], null]]));
    if (name === "rate") return columns(rows, 2);
    for (const [iteration, loss] of heldOut) {
      const row = rows.get(iteration) ?? [this.place(this.near(iteration)), null, null];
      row[2] = loss;
      rows.set(iteration, row);
    }
    return columns(rows, heldOut.length ? 3 : 2);
  }

  /** Returns the step of an iteration, or the last before it. */
  near(iteration) {
    const { steps } = this.history;
    const after = steps.findIndex((step) => step[0] > iteration);
    const step = steps[after < 0 ? steps.length - 1 : Math.max(0, after - 1)] ?? [iteration, 0];
    return [iteration, step[1]];
  }

  rebuild() {
    for (const [name, { columns: shown, digits }] of Object.entries(CURVES)) {
      this.charts[name]?.destroy();
      const data = this.data(name);
      this.charts[name] = new uPlot(this.options(name, shown.slice(0, data.length - 1), digits), data, byId(`${name}-chart`));
    }
    this.summarise();
  }

  fill() {
    for (const [name, chart] of Object.entries(this.charts)) {
      const data = this.data(name);
      if (data.length !== chart.series.length) return this.rebuild();
      chart.setData(data, !this.isZoomed);
      if (this.isZoomed) chart.redraw();
    }
    this.summarise();
  }

  resize() {
    for (const [name, chart] of Object.entries(this.charts)) {
      const width = byId(`${name}-chart`).clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }

  options(name, shown, digits) {
    const way = WAYS[this.way];
    const isLog = this.isLog && name === "loss";
    const axis = { stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
    const series = shown.map(([label, colour], index) => ({
      label,
      stroke: () => css(colour),
      width: 1.6,
      spanGaps: index > 0,
      points: { show: index > 0 || undefined, size: index > 0 ? 5 : undefined },
      value: (_, value) => number(value, digits),
    }));
    return {
      width: byId(`${name}-chart`).clientWidth || 320,
      height: HEIGHT,
      cursor: { sync: { key: "run" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: this.way === "time" }, y: { distr: isLog ? 3 : 1 } },
      series: [{ label: way.label, value: (_, value) => (value === null ? "–" : way.show(value)) }, ...series],
      axes: [
        { ...axis, space: 70, size: 30, ...(this.way === "time" ? {} : { values: (_, values) => values.map(short) }) },
        { ...axis, size: 52, values: (_, values) => values.map((value) => (value === null ? "" : short(value))) },
      ],
      hooks: {
        draw: [(chart) => this.drawEvents(chart)],
        setSelect: [(chart) => { this.isZoomed ||= chart.select.width > 0; }],
        setCursor: [(chart) => this.tellNear(chart)],
        ready: [(chart) => chart.over.addEventListener("dblclick", () => { this.isZoomed = false; })],
      },
    };
  }

  /** Returns the events that stand on the curves. */
  marks() {
    return this.history.events.filter((event) => TONES[event.kind]).slice(-MARKS_MAX);
  }

  drawEvents(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    for (const event of this.marks()) {
      const x = Math.round(chart.valToPos(this.place([event.iteration, event.time_s]), "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const isLow = event.kind === "checkpoint";
      ctx.strokeStyle = ctx.fillStyle = css(isLow ? "--faint" : TONES[event.kind]);
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(isLow ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, isLow ? bbox.top + bbox.height - 7 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Says what happened where the pointer is. */
  tellNear(chart) {
    const { left } = chart.cursor;
    if (left === undefined || left < 0) return;
    const near = this.marks().filter((event) => {
      const x = chart.valToPos(this.place([event.iteration, event.time_s]), "x");
      return Math.abs(x - left) <= NEAR_PX;
    });
    const texts = near.slice(-3).map((event) => `iteration ${number(event.iteration)}: ${happened(event)}`);
    setText("near", texts.join("; "));
  }

  /** Describes the curves to those who can't see them. */
  summarise() {
    for (const [name, { title, digits }] of Object.entries(CURVES)) {
      const values = this.history.steps.map((step) => step[name === "loss" ? 2 : 3]).filter((value) => value !== null);
      const [first, last] = [values[0], values[values.length - 1]].map((value) => number(value, digits));
      const text = values.length ? `${title}: ${first} at first, ${last} now` : `${title}: nothing yet`;
      byId(`${name}-chart`).setAttribute("aria-label", text);
    }
  }
}

/** Returns the first columns of rows, in the order of their places. */
function columns(rows, number) {
  const sorted = [...rows.values()].sort((one, other) => one[0] - other[0]);
  return Array.from({ length: number }, (_, index) => sorted.map((row) => row[index]));
}

/** Returns a number in few characters: 12k, 3.5M. */
function short(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
}
