// Draws the pipeline: a group of members for each stage, and the links between them.

import { byId, fill, html, milliseconds, number, speed, svg, tone } from "./elements.js";

const NARROW = 620;
const NAMED_MAX = 8;
const LABELLED_MAX = 12;
const MANY = 60;
const SERVERS = ["frontal", "backward"];

/** Draws the members and links of a state. A member that is clicked is opened. */
export function drawPicture(state, open) {
  const element = byId("picture");
  const width = element.clientWidth || 360;
  fill("picture", [state.members, state.links, width], () => picture(state, width, open));
  if (!byId("legend").childElementCount) byId("legend").append(...legend());
}

function picture(state, width, open) {
  const element = byId("picture");
  const groups = grouped(state);
  const plan = width < NARROW ? rows(groups, width) : columns(groups, width);
  element.setAttribute("viewBox", `0 0 ${width} ${plan.height}`);
  element.setAttribute("height", plan.height);
  const labelled = state.links.filter((link) => link.flows).length <= LABELLED_MAX && width >= NARROW;
  const parts = plan.groups.map(({ x, y, width: wide, height }) =>
    svg("rect", { class: "stage-back", x, y, width: wide, height, rx: 8 }),
  );
  const labels = [];
  for (const link of state.links) {
    const from = plan.place(link.from, false);
    const to = plan.place(link.to, state.members[link.to].stage === 0);
    parts.push(drawnLink(state, link, from, to, plan.down));
    if (labelled && link.flows && link.bytes_per_s) labels.push(linkLabel(link, from, to));
  }
  for (const group of plan.groups) {
    parts.push(svg("text", { class: "stage-name", x: group.x + group.width / 2, y: group.y + 17 }, group.title));
    group.members.forEach((member, index) => {
      const { x, y, radius } = group.places[index];
      const drawn = drawnMember(member, x, y, radius);
      drawn.addEventListener("click", () => open(state.members[member.index]));
      parts.push(drawn);
      if (group.named) parts.push(svg("text", { x, y: y + radius + 14 }, clipped(member.name, group.room)));
    });
  }
  return [...parts, ...labels];
}

/** Returns the members of each stage; those of stage 0 again behind the last, where flows end. */
function grouped(state) {
  if (state.run.organisation === "collaborative") {
    return [{ title: "hosts", members: state.members.map((member, index) => ({ ...member, index })) }];
  }
  const stages = Array.from({ length: Math.max(1, state.num_stages) }, () => []);
  state.members.forEach((member, index) => stages[member.stage]?.push({ ...member, index }));
  const groups = stages.map((members, stage) => ({ title: stage ? `stage ${stage}` : "stage 0: data", members }));
  return [...groups, { title: "stage 0: loss", members: stages[0], home: true }];
}

function columns(groups, width) {
  const room = width / groups.length;
  const deepest = Math.max(...groups.map((group) => group.members.length), 1);
  const named = deepest <= NAMED_MAX;
  const perColumn = Math.min(deepest, named ? NAMED_MAX : 16);
  const pitch = named ? 52 : 24;
  const height = 40 + perColumn * pitch;
  return planned(groups, { height, down: false }, (group, order) => {
    const box = { x: order * room + room * 0.14, y: 2, width: room * 0.72, height: height - 4 };
    const lines = Math.max(1, Math.ceil(group.members.length / perColumn));
    const inLine = Math.ceil(group.members.length / lines) || 1;
    const spread = (height - 40) / inLine;
    const places = group.members.map((_, index) => ({
      x: box.x + ((Math.floor(index / inLine) + 0.5) * box.width) / lines,
      y: 30 + ((index % inLine) + 0.5) * spread - (named ? 6 : 0),
      radius: named ? 11 : Math.min(8, (box.width / lines) * 0.4),
    }));
    return { ...box, places, named, room: box.width / 7 };
  });
}

function rows(groups, width) {
  let y = 2;
  const boxes = groups.map((group) => {
    const named = group.members.length <= 4;
    const perRow = named ? 4 : 14;
    const lines = Math.max(1, Math.ceil(group.members.length / perRow));
    const box = { x: 2, y, width: width - 4, height: 30 + lines * (named ? 46 : 24), named, lines };
    y += box.height + 40;
    return box;
  });
  return planned(groups, { height: y - 38, down: true }, (group, order) => {
    const box = boxes[order];
    const inLine = Math.ceil(group.members.length / box.lines) || 1;
    const places = group.members.map((_, index) => ({
      x: box.x + (((index % inLine) + 0.5) * box.width) / inLine,
      y: box.y + 26 + (Math.floor(index / inLine) + 0.5) * (box.named ? 46 : 24) - (box.named ? 8 : 0),
      radius: box.named ? 10 : 8,
    }));
    return { ...box, places, room: box.width / inLine / 7 };
  });
}

function planned(groups, size, boxOf) {
  const drawn = groups.map((group, order) => ({ ...group, ...boxOf(group, order) }));
  const here = new Map();
  const home = new Map();
  for (const group of drawn) {
    group.members.forEach((member, index) => (group.home ? home : here).set(member.index, group.places[index]));
  }
  return { ...size, groups: drawn, place: (index, ends) => (ends ? home : here).get(index) };
}

function drawnLink(state, link, from, to, down) {
  const bend = down ? (to.y - from.y) / 2 : (to.x - from.x) / 2;
  const middle = down
    ? `${from.x} ${from.y + bend}, ${to.x} ${to.y - bend}`
    : `${from.x + bend} ${from.y}, ${to.x - bend} ${to.y}`;
  const many = state.links.length > MANY ? " many" : "";
  const kind = (!link.flows ? "link idle" : link.holds_up ? "link slow" : "link") + many;
  const path = { class: kind, d: `M ${from.x} ${from.y} C ${middle}, ${to.x} ${to.y}` };
  const thick = link.flows ? Math.min(7, 1 + link.flows * 0.75) : 1.5;
  return svg("path", { ...path, "stroke-width": thick }, svg("title", {}, said(state, link)));
}

/** Returns what is known of a link, in one line. */
export function said(state, link) {
  const [from, to] = [link.from, link.to].map((index) => state.members[index].name);
  const flows = `${number(link.flows)} flow${link.flows === 1 ? "" : "s"}`;
  const held = link.holds_up ? ", holds the run up" : "";
  return `${from} to ${to}: ${flows}, ${speed(link.bytes_per_s)}, ${milliseconds(link.latency_s)}${held}`;
}

function linkLabel(link, from, to) {
  const at = 0.5;
  const place = { x: from.x + (to.x - from.x) * at, y: from.y + (to.y - from.y) * at - 5 };
  return svg("text", { class: "label", ...place }, speed(link.bytes_per_s));
}

function drawnMember(member, x, y, radius) {
  const kind = `member ${tone(member.state)}${member.own ? " own" : ""}${member.holds_up ? " slow" : ""}`;
  const known = [member.state || "state unknown", `${number(member.flows)} flows`, member.spends, member.device];
  if (member.holds_up) known.push("holds the run up");
  const title = svg("title", {}, `${member.name}: ${known.filter(Boolean).join(", ")}`);
  const size = 2 * radius - 2;
  const shape = SERVERS.includes(member.role)
    ? svg("rect", { class: kind, x: x - size / 2, y: y - size / 2, width: size, height: size, rx: 2 }, title)
    : svg("circle", { class: kind, cx: x, cy: y, r: member.role === "client" ? radius * 0.7 : radius }, title);
  if (tone(member.state) !== "bad") return shape;
  const arm = radius * 0.45;
  const cross = `M ${x - arm} ${y - arm} L ${x + arm} ${y + arm} M ${x + arm} ${y - arm} L ${x - arm} ${y + arm}`;
  return svg("g", {}, shape, svg("path", { class: "cross", d: cross }));
}

function legend() {
  const sign = (shape, text) => html("li", {}, svg("svg", { viewBox: "0 0 30 16", "aria-hidden": "true" }, shape), text);
  const line = (kind, width) => svg("path", { class: kind, d: "M 1 8 L 29 8", "stroke-width": width });
  const dot = (member) => drawnMember({ name: "", role: "relay", flows: 0, ...member }, 15, 8, 7);
  return [
    sign(dot({ state: "training" }), "works"),
    sign(dot({ state: "paused" }), "paused, or on its way"),
    sign(dot({ state: "lost" }), "lost"),
    sign(dot({ state: "training", own: true }), "this node"),
    sign(dot({ state: "training", role: "frontal" }), "server"),
    sign(line("link", 4), "flows: the thicker, the more"),
    sign(dot({ state: "training", holds_up: true }), "holds the run up"),
    sign(line("link slow", 3), "link that holds the run up"),
    sign(line("link idle", 2), "link without flows"),
  ];
}

const clipped = (text, room) => (text.length > room ? `${text.slice(0, Math.max(3, room - 1))}…` : text);
