// What a reader can do: with this node, and at the leader with the run.

import { act, button, confirmed, hasToken, tell } from "./acting.js";
import { byId, duration, fill, html, number, setText, svg } from "./elements.js";

const TOKENS_PERIOD_MS = 5000;

let leads = false;
const begun = new Set();

/** Shows the controls that this page may have, and keeps them as they are now. */
export function showControls({ acts, node, members }) {
  const may = acts && hasToken();
  leads = members.some((member) => member.own && member.leads);
  byId("locked").hidden = !acts || may;
  byId("controls").hidden = !may;
  byId("organiser").hidden = byId("organiser-link").hidden = !(may && leads);
  if (!may) return;
  fill("node-buttons", [node.state, leads], () => nodeButtons(node));
  once("settings", () => byId("settings-details").addEventListener("toggle", () => tell(showSettings), { once: true }));
  if (leads) once("tokens", keepShowingTokens);
}

function once(name, begin) {
  if (begun.has(name)) return;
  begun.add(name);
  begin();
}

function nodeButtons({ state }) {
  const buttons = [];
  if (!leads) {
    buttons.push(
      state === "paused"
        ? button("Resume", async () => void (await act("resume")))
        : button("Pause", async () => void (await act("pause"))),
    );
  }
  buttons.push(button(leads ? "End the run" : "Leave the run", leave, "bad"));
  return buttons;
}

async function leave() {
  const { means } = await act("leaving");
  const question = means || "This node finishes its work in hand, and leaves the run. Its daemon ends.";
  if (!(await confirmed(question, leads ? "End the run" : "Leave"))) return "";
  await act("drain", leads ? { end_run: true } : {});
  return "leaving: the node finishes what is in hand";
}

async function showSettings() {
  const { settings } = await act("set");
  const fields = settings.map((one) =>
    html("label", {}, html("span", {}, one.name), html("input", { name: one.name, value: one.value, title: one.counts })),
  );
  byId("settings").replaceChildren(...fields, html("button", {}, "Set"));
  byId("settings").onsubmit = (event) => {
    event.preventDefault();
    tell(() => setAll(settings));
  };
}

async function setAll(settings) {
  const values = {};
  for (const { name, value } of settings) {
    const wanted = byId("settings").elements[name].value.trim();
    if (wanted !== value) values[name] = wanted || "default";
  }
  if (!Object.keys(values).length) return "nothing has changed";
  await act("set", { values });
  await showSettings();
  return `set: ${Object.keys(values).join(", ")}`;
}

/** Returns the buttons for a member that the reader looks at. */
export function memberButtons({ id, name, own }) {
  if (!leads || own || !hasToken()) return [];
  const ban = async () => {
    byId("member").close();
    if (!(await confirmed(`Ban ${name} for a day? Its work is given to others at once.`, "Ban"))) return "";
    await act("node_ban", { node: id });
    return `${name} is banned for a day; lift it with: decod node unban ${id}`;
  };
  return [button("Ban", ban, "bad")];
}

byId("invite").addEventListener("submit", (event) => {
  event.preventDefault();
  const { uses, hours, note } = event.target.elements;
  tell(async () => {
    const asked = { uses: Number(uses.value), ttl_s: 3600 * Number(hours.value), note: note.value };
    const made = await act("token_create", asked);
    byId("invitation").hidden = false;
    byId("join-string").value = made.command;
    drawQr(made.qr);
    await showTokens();
    return "a join string is made: whoever has it can join";
  });
});

byId("copy").addEventListener("click", () =>
  tell(async () => {
    await navigator.clipboard.writeText(byId("join-string").value);
    return "copied";
  }),
);

function drawQr(rows) {
  const quiet = 4;
  const size = rows.length + 2 * quiet;
  const dark = rows.flatMap((row, y) => [...row].map((bit, x) => (bit === "1" ? `M${x + quiet} ${y + quiet}h1v1h-1z` : "")));
  byId("qr").setAttribute("viewBox", `0 0 ${size} ${size}`);
  byId("qr").replaceChildren(
    svg("rect", { class: "qr-light", width: size, height: size }),
    svg("path", { class: "qr-dark", d: dark.join("") }),
  );
}

async function keepShowingTokens() {
  if (hasToken() && leads) {
    try {
      await showTokens();
      await showNewcomers();
    } catch (error) {
      setText("acted", error.message);
    }
  }
  setTimeout(keepShowingTokens, TOKENS_PERIOD_MS);
}

async function showNewcomers() {
  const { newcomers } = await act("newcomer_list");
  byId("newcomers-box").hidden = !newcomers.length;
  fill("newcomers", newcomers.map((one) => one.id), () => newcomers.map(newcomerItem));
}

function newcomerItem({ id, name, address, token }) {
  const decide = (mayEnter) => async () => {
    if (!mayEnter && !(await confirmed(`Send ${name} away? Its daemon ends.`, "Refuse"))) return "";
    await act("newcomer_decide", { node: id, may_enter: mayEnter });
    await showNewcomers();
    return mayEnter ? `${name} may come in` : `${name} is sent away`;
  };
  const who = html("strong", {}, name);
  const buttons = html("span", { class: "buttons" }, button("Accept", decide(true)), button("Refuse", decide(false), "bad"));
  return html("li", {}, who, ` (${id.slice(0, 8)}) at ${address}, with token ${token} `, buttons);
}

async function showTokens() {
  const { tokens } = await act("token_list");
  const shown = tokens.filter((one) => one.role === "volunteer");
  fill("tokens-rows", shown, () => shown.map(tokenRow));
}

function tokenRow({ id, state, used, uses, expires_in_s: left, note }) {
  const cells = [state, `${number(used)} of ${number(uses)}`, duration(Math.max(0, left)), note || "–"];
  const revoke = async () => {
    await act("token_revoke", { id });
    await showTokens();
    return `${id} lets nobody in any more`;
  };
  const cell = (text, index) => html("td", { class: index === 1 ? "number" : null }, text);
  const last = html("td", {}, ...(state === "live" ? [button("Revoke", revoke)] : []));
  return html("tr", {}, html("th", { scope: "row" }, id), ...cells.map(cell), last);
}
