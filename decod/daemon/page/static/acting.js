// Sends what a reader wants to be done to the node, with the token from the page's address.

import { byId, html, setText } from "./elements.js";

const KEPT = "decod-token";

/** Takes the token out of the address, where others might read it, and keeps it for this tab. */
export function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  sessionStorage.setItem(KEPT, token);
  history.replaceState(null, "", location.pathname);
}

export const hasToken = () => Boolean(sessionStorage.getItem(KEPT));

/** Sends a request of the control socket; returns its answer. Throws an error with a text. */
export async function act(command, fields = {}) {
  const answer = await fetch("do", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${sessionStorage.getItem(KEPT)}` },
    body: JSON.stringify({ command, ...fields }),
  });
  if (answer.status === 401) {
    sessionStorage.removeItem(KEPT);
    throw new Error((await answer.text()).trim());
  }
  if (!answer.headers.get("content-type")?.startsWith("application/json")) {
    throw new Error((await answer.text()).trim());
  }
  const told = await answer.json();
  if (told.error) throw new Error(`${told.error.what}: ${told.error.why}. Try: ${told.error.fix}`);
  return told;
}

/** Does something, and says below the controls how it went. */
export async function tell(work) {
  setText("acted", "asking the node …");
  byId("acted").className = "";
  try {
    setText("acted", (await work()) ?? "");
  } catch (error) {
    setText("acted", error.message);
    byId("acted").className = "bad";
  }
}

/** Asks before something that can't be undone; resolves to whether the answer is yes. */
export function confirmed(question, yes) {
  const dialog = byId("question");
  setText("question-text", question);
  setText("question-yes", yes);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Returns a button that does something. */
export function button(text, work, kind = null) {
  const made = html("button", { type: "button", class: kind }, text);
  made.addEventListener("click", () => tell(work));
  return made;
}
