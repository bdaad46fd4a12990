// Asks the node for the run's state once a second, and shows it.

import { Chart } from "./chart.js";
import { byId, clock, duration, fill, html, milliseconds, number, setText, speed, tone } from "./elements.js";
import { drawPicture } from "./picture.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 5000;
const STEPS_SHOWN_MAX = 50;
const EVENTS_SHOWN_MAX = 200;

const history = { generation: "", steps: [], events: [] };
const charts = [new Chart("loss", 2, 4), new Chart("rate", 3, 0)];
let state = null;
let answered = null;

async function ask() {
  const { generation, steps, events } = history;
  const query = new URLSearchParams({ generation, steps: steps.length, events: events.length });
  const answer = await fetch(`state.json?${query}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`the node answers ${answer.status}`);
  return answer.json();
}

/** Adds what is new to the history; returns the events that came, unless all are new. */
function remember(news) {
  const first = news.generation !== history.generation;
  if (first) Object.assign(history, { generation: news.generation, steps: [], events: [] });
  history.steps.push(...news.steps);
  history.events.push(...news.events);
  return first ? [] : news.events;
}

/** Looks, again and again. The next look never begins before the last has its answer. */
async function keepLooking() {
  let found = null;
  try {
    found = await ask();
  } catch {
    const since = answered ? ` since ${clock(answered)}. What you see is as it was then.` : ".";
    setGone(`This node does not answer${since}`);
  }
  setTimeout(keepLooking, PERIOD_MS);
  if (found) take(found);
}

function take(found) {
  state = found;
  answered = Date.now() / 1e3;
  setGone("");
  const news = remember(state.history);
  show(state);
  announce(news);
}

function setGone(text) {
  setText("gone", text);
  byId("gone").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

/** Tells a screen reader who came and went. */
function announce(events) {
  if (events.length) setText("news", events.map((event) => `${event.name} ${VERBS[event.kind]}`).join("; "));
}

function show(now) {
  const { run, node } = now;
  const name = run.name || "decod";
  document.title = `${name}: ${run.state || "starting"}`;
  setText("run-name", name);
  setText("run-state", run.state || "starting");
  byId("run-state").className = `state ${tone(run.state)}`;
  setText("message", run.message);
  setText("version", node.decod_version);
  setText("credit", node.credit);
  setText("updated", clock(answered));
  fill("facts", [run, now.members.length], () => facts(runFacts(now)));
  fill("node-facts", node, () => facts(nodeFacts(node)));
  fill("steps-rows", history.steps.slice(-STEPS_SHOWN_MAX), stepRows);
  fill("members-rows", [now.members, now.former], () => memberRows(now));
  fill("links-rows", [now.links, now.members], () => linkRows(now));
  fill("events", [history.generation, history.events.length], eventItems);
  fill("recent", now.recent.map((one) => one.text), () => recentItems(now.recent));
  setText("members-count", `${number(now.members.length)} present, ${number(now.former.length)} gone`);
  setText("picture-summary", summary(now));
  setText("slow", run.slow.join("; "));
  drawPicture(now);
  charts.forEach((chart) => chart.show(history.steps));
}

function facts(pairs) {
  return pairs.map(([term, value]) => html("div", {}, html("dt", {}, term), html("dd", {}, value)));
}

function runFacts({ run, members }) {
  return [
    ["Iteration", number(run.iteration) + (run.num_iterations ? ` of ${number(run.num_iterations)}` : "")],
    ["Loss", number(run.loss, 4)],
    ["Tokens/s", number(run.tokens_per_s)],
    ["Tokens so far", number(run.num_tokens)],
    ["Running for", duration(run.age_s)],
    ["Time left", duration(run.left_s)],
    ["Members", number(members.length)],
    ["Leader", run.electing ? "being elected" : run.leader || "–"],
    ["Organisation", run.organisation || "–"],
    ["Waiting to enter", number(run.num_candidates)],
    ["Checkpoint", number(run.checkpoint)],
    ["Held-out loss", number(run.held_out_loss, 4)],
    ["Held-out perplexity", number(run.held_out_perplexity, 2)],
  ];
}

function nodeFacts(node) {
  const known = [
    ["Name", node.name],
    ["Id", node.id],
    ["State", node.state],
    ["Role", node.role],
    ["Stage", number(node.stage)],
    ["Capacity", number(node.capacity)],
    ["Device", node.device],
    ["Address", node.address],
    ["Microbatches", number(node.microbatches)],
    ["Tokens", number(node.tokens)],
  ];
  if (node.syncing_percent !== null) known.push(["Fetching its state", `${number(node.syncing_percent)} %`]);
  if (node.disk_problem) known.push(["Disk", node.disk_problem]);
  return known.map(([term, value]) => [term, value || "–"]);
}

const cell = (text, kind = null) => html("td", { class: kind }, text);
const counted = (value) => cell(number(value), "number");

function stepRows() {
  return history.steps
    .slice(-STEPS_SHOWN_MAX)
    .reverse()
    .map(([iteration, time, loss, rate]) =>
      html("tr", {}, counted(iteration), cell(clock(time)), cell(number(loss, 4), "number"), counted(rate)),
    );
}

function memberRows({ members, former }) {
  const totals = new Map();
  for (const one of [...members, ...former]) {
    totals.set(one.stage, (totals.get(one.stage) ?? 0) + (one.microbatches ?? 0));
  }
  const share = (one) => {
    // Without an answer from the leader, what others have done is unknown.
    if (one.microbatches === null) return cell("–");
    const part = one.microbatches && totals.get(one.stage) ? one.microbatches / totals.get(one.stage) : 0;
    const label = `${number(100 * part, 0)} %`;
    return html("td", {}, html("meter", { value: part, "aria-label": `Share of ${one.name}` }), ` ${label}`);
  };
  const rows = members.map((one) => {
    const tags = [one.leads && "leads", one.own && "this node", one.holds_up && "holds the run up"].filter(Boolean);
    const name = html("th", { scope: "row" }, one.name, ...tags.map((tag) => html("span", { class: "tag" }, tag)));
    const where = [cell(number(one.stage)), cell(one.role || "–"), cell(one.state || "–", tone(one.state))];
    const counts = [one.capacity, one.flows, one.microbatches].map(counted);
    return html("tr", {}, name, ...where, ...counts, share(one), cell(one.spends || "–"), cell(one.device || "–"));
  });
  const gone = former.map((one) => {
    const dashes = [cell("–", "number"), cell("–", "number")];
    const where = [cell(number(one.stage)), cell("–"), cell("gone")];
    const name = html("th", { scope: "row" }, one.name);
    const done = [counted(one.microbatches), share(one), cell("–"), cell("–")];
    return html("tr", { class: "former" }, name, ...where, ...dashes, ...done);
  });
  return [...rows, ...gone];
}

function linkRows({ links, members }) {
  return links.map((link) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, members[link.from].name),
      cell(members[link.to].name),
      counted(link.flows),
      cell(speed(link.bytes_per_s), "number"),
      cell(milliseconds(link.latency_s), "number"),
      cell(milliseconds(link.cost_s), "number"),
    ),
  );
}

const VERBS = { there: "was there at the start", came: "came", left: "left", lost: "was lost", gone: "is gone" };

function eventItems() {
  if (!history.events.length) return [html("li", {}, "nobody yet")];
  return history.events
    .slice(-EVENTS_SHOWN_MAX)
    .reverse()
    .map((event) => {
      const kind = { there: "", came: "good", lost: "bad" }[event.kind] ?? "warn";
      const what = html("strong", { class: kind }, VERBS[event.kind] ?? event.kind);
      const why = event.reason ? `: ${event.reason}` : "";
      return html("li", {}, html("time", {}, clock(event.time_s)), `${event.name} (stage ${event.stage}) `, what, why);
    });
}

function recentItems(recent) {
  if (!recent.length) return [html("li", {}, "all is routine")];
  const now = Date.now() / 1e3;
  return [...recent].reverse().map((one) => html("li", {}, html("time", {}, clock(now - (one.age_s ?? 0))), one.text));
}

function summary({ members, links, num_stages: stages, run }) {
  // Without an answer from the leader, the states of the others are unknown, and most links.
  const isKnown = members.every((one) => one.state);
  const flows = links.filter((link) => members[link.from].stage === 0).reduce((sum, link) => sum + (link.flows ?? 0), 0);
  const working = members.filter((one) => tone(one.state) === "good").length;
  const people = `${number(members.length)} members in ${number(stages)} stages, ${number(isKnown ? working : null)} at work`;
  if (run.organisation !== "servers") return `${people}; ${number(isKnown ? flows : null)} flows.`;
  const clients = members.filter((one) => one.role === "client").length;
  return `${people}; ${number(clients)} of them clients, which take work from their stage's servers.`;
}

new ResizeObserver(() => state && drawPicture(state)).observe(byId("picture-box"));
keepLooking();
