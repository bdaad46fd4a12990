// Asks the node for the run's state once a second, and shows it.

import { takeToken } from "./acting.js";
import { memberButtons, showControls } from "./controls.js";
import { Curves } from "./curves.js";
import { byId, clock, duration, fill, happened, html, milliseconds, number, setText, size, speed, tone } from "./elements.js";
import { drawPicture } from "./picture.js";

const PERIOD_MS = 1000;
const PUBLIC_PERIOD_MS = 5000;
const TIMEOUT_MS = 5000;
const STEPS_SHOWN_MAX = 50;
const EVENTS_SHOWN_MAX = 200;
const MEMBER_EVENTS_MAX = 8;

const history = { generation: "", steps: [], events: [], held_out: [], texts: [], rest: "" };
const curves = new Curves();
let state = null;
let answered = null;

async function ask() {
  const { generation, steps, events, rest } = history;
  const query = new URLSearchParams({ generation, steps: steps.length, events: events.length, rest });
  const answer = await fetch(`state.json?${query}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`the node answers ${answer.status}`);
  return answer.json();
}

/** Adds what is new to the history; returns the events that came, unless all are new. */
function remember(news) {
  const first = news.whole;
  if (first) Object.assign(history, { generation: news.generation, steps: [], events: [] });
  history.steps.push(...news.steps);
  history.events.push(...news.events);
  history.rest = news.rest;
  history.held_out = news.held_out ?? history.held_out;
  history.texts = news.texts ?? history.texts;
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
  setTimeout(keepLooking, (found ?? state)?.public ? PUBLIC_PERIOD_MS : PERIOD_MS);
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
  if (events.length) setText("news", events.map(happened).join("; "));
}

function show(now) {
  const { run, node } = now;
  const name = run.name || "decod";
  document.title = `${name}: ${run.state || "starting"}`;
  document.body.classList.toggle("public", Boolean(now.public));
  document.body.classList.toggle("shared", isShared(run));
  setText("rate-unit", isShared(run) ? "samples a second" : "tokens a second");
  setText("run-name", name);
  setText("run-state", run.state || "starting");
  byId("run-state").className = `state ${tone(run.state)}`;
  const waits = run.waits.map(({ what, age_s: age }) => `waiting for ${what}, for ${duration(age)} so far`);
  setText("message", [...waits, run.message].filter(Boolean).join("; "));
  setText("version", node.decod_version);
  setText("evening", evening(now));
  setText("credit", node.credit);
  setText("updated", clock(answered));
  showBar(run);
  fill("facts", [run, now.members.length], () => facts(runFacts(now)));
  fill("node-facts", node, () => facts(nodeFacts(node)));
  fill("steps-rows", history.steps.slice(-STEPS_SHOWN_MAX), stepRows);
  fill("members-rows", [now.members, now.former], () => memberRows(now));
  fill("links-rows", [now.links, now.members], () => linkRows(now));
  fill("events", [history.generation, history.events.length], eventItems);
  byId("texts-box").hidden = !history.texts.length;
  fill("texts", history.texts, textItems);
  setText("texts-cost", run.texts_share === null ? "" : `It takes the leader ${number(100 * run.texts_share, 1)} % of the time.`);
  fill("recent", now.recent.map((one) => one.text), () => recentItems(now.recent));
  setText("members-count", `${number(now.members.length)} present, ${number(now.former.length)} gone`);
  setText("picture-summary", summary(now));
  setText("slow", run.slow.join("; "));
  drawPicture(now, showMember);
  showControls(now);
  curves.show(history, run.iteration ? (run.num_tokens ?? 0) / run.iteration : 1);
}

function showBar({ iteration, num_iterations: all, left_s: left, num_tokens: tokens }) {
  byId("bar-box").hidden = !all;
  if (!all) return;
  byId("bar").value = (iteration ?? 0) / all;
  const ends = left === null ? "" : `, ${duration(left)} left`;
  setText("bar-text", `${number((100 * iteration) / all, 0)} %: ${number(iteration)} of ${number(all)} iterations, ${number(tokens)} tokens${ends}`);
}

function facts(pairs) {
  return pairs.map(([term, value]) => html("div", {}, html("dt", {}, term), html("dd", {}, value)));
}

/** Whether each host has the whole model: a run of the collaborative optimizer. */
const isShared = (run) => run.organisation === "collaborative";

function runFacts({ run, members }) {
  return [
    [isShared(run) ? "Round" : "Iteration", number(run.iteration)],
    ["Loss", number(run.loss, 4)],
    [isShared(run) ? "Samples/s" : "Tokens/s", number(run.tokens_per_s)],
    ["Tokens so far", number(run.num_tokens)],
    ["Running for", duration(run.age_s)],
    ["Members", number(members.length)],
    ["Leader", run.electing ? "being elected" : run.leader || "–"],
    ["Organisation", run.organisation],
    ["Waiting to enter", number(run.num_candidates)],
    ["Checkpoint", number(run.checkpoint)],
    ["Held-out loss", number(run.held_out_loss, 4)],
    ["Held-out perplexity", number(run.held_out_perplexity, 2)],
  ].filter(isKnown);
}

const isKnown = ([, value]) => value && value !== "–";

/** Returns what this node has done since it joined, and what the model has learnt meanwhile. */
function evening({ node, run, members }) {
  if (!node.in_run_s || !node.tokens) return "";
  const since = Date.now() / 1e3 - node.in_run_s;
  const seen = history.steps.filter((step) => step[1] >= since && step[2] !== null);
  const own = members.find((one) => one.own);
  const all = members.filter((one) => own && one.stage === own.stage).reduce((sum, one) => sum + (one.microbatches ?? 0), 0);
  const share = own?.stage && all ? `, ${number((100 * own.microbatches) / all, 0)} % of the work of stage ${own.stage}` : "";
  const learnt = seen.length > 1 ? ` Meanwhile the model's loss went from ${number(seen[0][2], 4)} to ${number(run.loss, 4)}.` : "";
  return `In the ${duration(node.in_run_s)} since it joined, this node has worked on ${number(node.tokens)} tokens${share}.${learnt}`;
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
    const open = html("button", { type: "button", class: "plain" }, one.name);
    open.addEventListener("click", () => showMember(one));
    const name = html("th", { scope: "row" }, open, ...tags.map((tag) => html("span", { class: "tag" }, tag)));
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

function eventItems() {
  if (!history.events.length) return [html("li", {}, "nobody yet")];
  return history.events
    .slice(-EVENTS_SHOWN_MAX)
    .reverse()
    .map((event) => {
      const kind = { there: "", checkpoint: "", came: "good", lost: "bad" }[event.kind] ?? "warn";
      return html("li", {}, html("time", {}, clock(event.time_s)), html("span", { class: kind }, happened(event)));
    });
}

function textItems() {
  return [...history.texts]
    .reverse()
    .map(([iteration, prompt, text]) =>
      html("li", {}, html("span", { class: "unit" }, `${number(iteration)} `), html("strong", {}, prompt), text),
    );
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
  if (isShared(run)) return `${number(members.length)} hosts, each with the whole model; ${number(working)} have the run's state.`;
  const people = `${number(members.length)} members in ${number(stages)} stages, ${number(isKnown ? working : null)} at work`;
  if (run.organisation !== "servers") return `${people}; ${number(isKnown ? flows : null)} flows.`;
  const clients = members.filter((one) => one.role === "client").length;
  return `${people}; ${number(clients)} of them clients, which take work from their stage's servers.`;
}

const REACHES = { dialled: "by anybody", outbound: "by its own connections" };

function waitsFor({ waits_for: ids, state: own }) {
  if (own === "paused") return "being resumed";
  return ids.map((id) => state.members.find((other) => other.id === id)?.name ?? id).join(", ");
}

/** Shows all that is known of one member. */
function showMember(one) {
  const place = state.members.findIndex((other) => other.id === one.id);
  const fastest = (end) => {
    const speeds = state.links.filter((link) => link[end] === place).map((link) => link.bytes_per_s ?? 0);
    return Math.max(0, ...speeds) ? speed(Math.max(...speeds)) : null;
  };
  const events = history.events.filter((event) => event.name === one.name).slice(-MEMBER_EVENTS_MAX);
  setText("member-name", one.name);
  const known = [
    ["Id", one.id],
    ["Stage", number(one.stage)],
    ["Role", one.role],
    ["State", one.state],
    ["Device", one.device],
    ["Memory", size(one.memory_bytes)],
    ["Version", one.version],
    ["Sends at up to", fastest("from")],
    ["Receives at up to", fastest("to")],
    ["Reached", REACHES[one.reach]],
    ["In the run since", `iteration ${number(one.since_iteration)}`],
    ["Waits for", waitsFor(one)],
    ["Capacity", number(one.capacity)],
    ["Flows", number(one.flows)],
    ["Microbatches", number(one.microbatches)],
    ["An iteration", one.spends],
    ["History", events.map((event) => `${clock(event.time_s)} ${event.kind}`).join(", ")],
  ];
  // What a node says of itself comes last, and replaces what the leader says.
  const all = new Map(one.own ? [...known, ...nodeFacts(state.node)] : known);
  byId("member-facts").replaceChildren(...facts([...all].filter(isKnown)));
  byId("member-buttons").replaceChildren(...memberButtons(one));
  byId("member").showModal();
}

new ResizeObserver(() => state && drawPicture(state, showMember)).observe(byId("picture-box"));
takeToken();
keepLooking();
