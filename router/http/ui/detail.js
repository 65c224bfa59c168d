// The record of one request, as the router and its store know it, looked at again while it runs.

import { CallError, json } from "./calls.js";
import { bar, byId, el, say } from "./dom.js";
import { count, duration, word } from "./format.js";
import { PHASES, phasesOf } from "./requests.js";

const LOOK_MS = 1000;
const ENDED = new Set(["REQUEST_STATE_FINISHED", "REQUEST_STATE_CANCELLED", "REQUEST_STATE_FAILED"]);
const path = (requestId) => `api/requests/${encodeURIComponent(requestId)}`;

/** The record of a request. Throws CallError. */
export const record = (requestId) => json(path(requestId));

/** Asks for the end of a request. Throws CallError. */
export const cancel = (requestId) => json(`${path(requestId)}/cancel`, { method: "POST" });

function facts(pairs) {
  const list = el("dl", "facts");
  for (const [name, value] of pairs) {
    if (value !== "" && value !== undefined && value !== null) list.append(el("dt", "", name), el("dd", "", value));
  }
  return list;
}

function phases(timings) {
  const shown = el("div", "bar phases tall");
  bar(shown, phasesOf(timings));
  const rows = PHASES.filter(([, field]) => timings[field] > 0).map(([name, field, words]) =>
    el("tr", "", el("td", "", el("i", `dot ${name}`), words), el("td", "number", duration(timings[field]))),
  );
  if (timings.first_token_s) rows.push(el("tr", "", el("td", "", "first token after"), el("td", "number", duration(timings.first_token_s))));
  rows.push(el("tr", "", el("td", "", "in all"), el("td", "number", duration(timings.total_s))));
  return el("div", "", shown, el("table", "plain", el("tbody", "", ...rows)));
}

function states(transitions) {
  const began = transitions.length ? Date.parse(transitions[0].at) : 0;
  const rows = transitions.map((step) =>
    el(
      "tr",
      "",
      el("td", "number", `+${duration((Date.parse(step.at) - began) / 1000)}`),
      el("td", "", word(step.state, "REQUEST_STATE_")),
      el("td", "quiet", [step.event, step.attempt > 1 ? `attempt ${step.attempt}` : ""].filter(Boolean).join(", ")),
      el("td", "quiet mono", step.detail),
    ),
  );
  return el("div", "scroll", el("table", "plain", el("tbody", "", ...rows)));
}

function body(one) {
  const usage = one.usage;
  return el(
    "div",
    "",
    facts([
      ["State", word(one.state, "REQUEST_STATE_")],
      ["Ended by", one.finish_reason === "FINISH_REASON_UNSPECIFIED" ? "" : word(one.finish_reason, "FINISH_REASON_")],
      ["Cause", word(one.cause, "")],
      ["Tenant", one.tenant],
      ["Model", one.adapter ? `${one.model} with ${one.adapter}` : one.model],
      ["Attempt", one.attempt],
      ["Priority", one.priority],
      ["Router", one.router],
      ["Prefill", one.prefill_member],
      ["Decode", one.decode_member],
      ["Tokens", usage ? `${count(usage.prompt_tokens)} prompt (${count(usage.cached_prompt_tokens)} cached), ${count(usage.returned_tokens)} returned` : "not known"],
      ["Cancelled for", one.cancel_reason],
    ]),
    el("h3", "", "Where its time went"),
    phases(one.timings ?? {}),
    el("h3", "", "States"),
    states(one.transitions ?? []),
  );
}

/** The dialog with one record. */
export class Detail {
  constructor() {
    this.dialog = byId("detail");
    this.shown = "";
    byId("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.shown = "";
      clearTimeout(this.timer);
    });
    byId("detail-cancel").addEventListener("click", () => this.cancel());
  }

  /** Shows the record of a request until the dialog is closed. */
  async open(requestId) {
    this.shown = requestId;
    say(byId("detail-title"), requestId);
    byId("detail-body").replaceChildren(el("p", "quiet", "Loading…"));
    byId("detail-cancel").hidden = true;
    if (!this.dialog.open) this.dialog.showModal();
    await this.look(requestId);
  }

  async look(requestId) {
    clearTimeout(this.timer);
    let again = true;
    try {
      const one = await record(requestId);
      if (this.shown !== requestId) return;
      byId("detail-body").replaceChildren(body(one));
      again = !ENDED.has(one.state);
      byId("detail-cancel").hidden = !again;
    } catch (error) {
      if (this.shown !== requestId) return;
      const words = error instanceof CallError ? error.message : "The router does not answer.";
      byId("detail-body").replaceChildren(el("p", "notice", words));
    }
    if (again) this.timer = setTimeout(() => this.look(requestId), LOOK_MS);
  }

  async cancel() {
    const requestId = this.shown;
    try {
      await cancel(requestId);
    } catch (error) {
      byId("detail-body").prepend(el("p", "notice", error.message));
    }
    if (this.shown === requestId) await this.look(requestId);
  }
}
