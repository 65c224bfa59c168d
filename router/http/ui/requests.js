// Requests that run and requests that have ended, each with a bar of where its time went.

import { bar, byId, el, keyed, named, part, say } from "./dom.js";
import { count, duration, word } from "./format.js";

/** Phases of a request in the order of a bar: name, field of the record's timings, words. */
export const PHASES = [
  ["check", "check_s", "request checked"],
  ["queue", "queue_s", "waiting for budget"],
  ["prefill-queue", "prefill_queue_s", "waiting for the prefill member"],
  ["prefill", "prefill_s", "prompt computed"],
  ["handover", "handover_exposed_s", "pages handed over, after the last chunk"],
  ["decode", "decode_s", "tokens generated"],
  ["send", "send_s", "writing to the client"],
];

for (const [name, , words] of PHASES) {
  if (name === "prefill-queue") continue;
  const item = el("li", "", el("i", `dot ${name}`), name === "handover" ? "hand-over" : name);
  item.title = words;
  byId("phases").append(item);
}

/** Segments of a bar for a request's timings. What no phase explains is told too. */
export function phasesOf(timings) {
  const told = timings ?? {};
  const segments = PHASES.map(([name, field, words]) => {
    const value = told[field] || 0;
    return { name, value, title: `${words}: ${duration(value)}` };
  });
  const known = segments.reduce((sum, segment) => sum + segment.value, 0);
  const rest = Math.max(0, (told.total_s || 0) - known);
  segments.push({ name: "rest", value: rest, title: `between phases: ${duration(rest)}` });
  return segments;
}

function row(open) {
  const button = named("id", el("button", "link mono"));
  button.type = "button";
  button.addEventListener("click", () => open(button.closest("tr").dataset.key));
  return el(
    "tr",
    "",
    el("td", "", button),
    named("tenant", el("td", "clip")),
    el("td", "", named("state", el("span", "pill"))),
    named("prompt", el("td", "number")),
    named("tokens", el("td", "number")),
    named("members", el("td", "clip quiet")),
    el("td", "timeline", named("bar", el("div", "bar phases"))),
    named("time", el("td", "number")),
  );
}

const STAGE_STYLES = { queue: "wait", seat: "wait", cancel: "denied", reader: "wait" };

function base(child, one, longest) {
  say(part(child, "id"), one.request_id);
  part(child, "id").title = `${one.request_id}: show its record`;
  say(part(child, "tenant"), one.adapter ? `${one.tenant} · ${one.adapter}` : one.tenant);
  say(part(child, "members"), [one.prefill_member, one.decode_member].filter(Boolean).join(" → ") || "–");
  const total = one.timings?.total_s || 0;
  bar(part(child, "bar"), phasesOf(one.timings));
  part(child, "bar").style.width = `${Math.max(12, 100 * Math.sqrt(total / longest)).toFixed(1)}%`;
  say(part(child, "time"), duration(total));
}

function live(child, one, longest) {
  base(child, one, longest);
  const stage = word(one.stage, "REQUEST_STAGE_");
  say(part(child, "state"), one.attempt > 1 ? `${stage}, attempt ${one.attempt}` : stage);
  part(child, "state").className = `pill ${STAGE_STYLES[stage] ?? "live"}`;
  const whole = one.computed_prompt_tokens >= one.prompt_tokens;
  say(part(child, "prompt"), whole ? count(one.prompt_tokens) : `${count(one.computed_prompt_tokens)}/${count(one.prompt_tokens)}`);
  say(part(child, "tokens"), `${count(one.output_tokens)}/${count(one.max_output_tokens * Math.max(1, one.choices))}`);
}

const END_STYLES = { finished: "done", cancelled: "wait", failed: "denied" };

function ended(child, one, longest) {
  base(child, one, longest);
  const state = word(one.state, "REQUEST_STATE_");
  const reason = word(one.finish_reason, "FINISH_REASON_");
  const cause = one.cause ? `: ${one.cause.replaceAll("_", " ")}` : "";
  say(part(child, "state"), reason + (state === "failed" ? cause : ""));
  part(child, "state").title = `${state}${cause}`;
  part(child, "state").className = `pill ${END_STYLES[state] ?? ""}`;
  say(part(child, "prompt"), one.usage ? count(one.usage.prompt_tokens) : "–");
  say(part(child, "tokens"), one.usage ? count(one.usage.returned_tokens) : "–");
}

/** Shows the requests of a view; `open(id)` shows one of them. */
export function showRequests(view, open) {
  const longest = Math.max(1e-3, ...[...view.requests, ...view.ended].map((one) => one.timings?.total_s || 0));
  const key = (one) => one.request_id;
  const running = [...view.requests].reverse();
  const ends = new Map(view.ended.filter((one) => one.request_id).map((one) => [one.request_id, one]));
  keyed(byId("live"), running, key, () => row(open), (child, one) => live(child, one, longest));
  keyed(byId("ended"), [...ends.values()], key, () => row(open), (child, one) => ended(child, one, longest));
  byId("no-requests").hidden = running.length + ends.size > 0;
  const hidden = view.running_requests - running.length;
  say(byId("requests-count"), `${count(view.running_requests)} running${hidden > 0 ? `, ${count(hidden)} of them not shown` : ""}`);
}
