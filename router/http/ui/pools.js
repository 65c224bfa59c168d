// Members, pool by pool: what they do, how fast, and what their pages are.

import { bar, byId, el, keyed, named, part, say } from "./dom.js";
import { count, duration, percent, plural, rate, word } from "./format.js";

/** States of pages, in the order of a bar. */
const PAGES = ["owned", "granted", "pinned", "quarantined", "cached", "free"];
const WORDS = {
  owned: "of a sequence",
  granted: "being filled by a hand-over",
  pinned: "still read by a transfer",
  quarantined: "its writer is not known to have stopped",
  cached: "of earlier prompts, to be found again",
  free: "free",
};
/** Looks whose rates are drawn as a line. */
const LOOKS = 60;
/** Starts of members that are remembered; the one that came first is forgotten. */
const MOST_HISTORIES = 1024;
const histories = new Map();

for (const state of PAGES) {
  const item = el("li", "", el("i", `dot ${state}`), state);
  item.title = WORDS[state];
  byId("legend").append(item);
}

function sparkline(member) {
  const key = `${member.name} ${member.address} ${member.incarnation}`;
  const history = histories.get(key) ?? [];
  history.push(member.tokens_per_s || 0);
  if (history.length > LOOKS) history.shift();
  while (history.length < 2) history.unshift(history[0]);
  histories.set(key, history);
  if (histories.size > MOST_HISTORIES) histories.delete(histories.keys().next().value);
  const most = Math.max(1, ...history);
  return history.map((value, place) => `${((place + LOOKS - history.length) * 100) / (LOOKS - 1)},${23 - (21 * value) / most}`);
}

function line(points) {
  return points.join(" ");
}

function card() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("spark");
  const area = document.createElementNS(svg.namespaceURI, "polygon");
  const stroke = document.createElementNS(svg.namespaceURI, "polyline");
  area.dataset.part = "area";
  stroke.dataset.part = "line";
  svg.append(area, stroke);
  const figure = (name, words) => el("div", "figure", named(name, el("strong")), el("span", "quiet", words));
  return el(
    "article",
    "card member",
    el(
      "div",
      "title",
      named("name", el("h4")),
      named("state", el("span", "pill")),
    ),
    named("where", el("p", "quiet mono")),
    named("reason", el("p", "reason")),
    el("div", "row", figure("runs", "run"), figure("waits", "wait"), figure("rate", "tokens/s"), figure("step", "a step"), svg),
    named("bar", el("div", "bar pages")),
    named("pages", el("p", "quiet")),
  );
}

const STYLES = { ready: "live", draining: "wait", stale: "wait" };

function update(child, member) {
  const state = word(member.state, "MEMBER_STATE_");
  say(part(child, "name"), member.name || member.address);
  say(part(child, "state"), state);
  part(child, "state").className = `pill ${STYLES[state] ?? "denied"}`;
  child.classList.toggle("gone", state === "lost" || state === "unreached");
  const news = member.news_age_s > 2 ? `, heard of ${duration(member.news_age_s)} ago` : "";
  say(part(child, "where"), member.name ? member.address + news : "never reached");
  part(child, "where").hidden = !part(child, "where").textContent;
  say(part(child, "reason"), member.reason);
  part(child, "reason").hidden = !member.reason;
  say(part(child, "runs"), `${count(member.running_sequences)}/${count(member.max_sequences)}`);
  say(part(child, "waits"), count(member.waiting_sequences));
  say(part(child, "rate"), rate(member.tokens_per_s));
  const stepS = member.step_s || (member.steps_per_s ? 1 / member.steps_per_s : 0);
  say(part(child, "step"), stepS ? duration(stepS) : "–");
  const points = sparkline(member);
  part(child, "line").setAttribute("points", line(points));
  const first = points[0].split(",")[0];
  part(child, "area").setAttribute("points", line([`${first},24`, ...points, "100,24"]));
  const pages = member.pages ?? {};
  const total = PAGES.reduce((sum, name) => sum + (pages[name] || 0), 0);
  bar(
    part(child, "bar"),
    PAGES.map((name) => ({ name, value: pages[name] || 0, title: `${count(pages[name] || 0)} ${name}: ${WORDS[name]}` })),
  );
  const used = total - (pages.free || 0) - (pages.cached || 0);
  const more = [
    [pages.cached, "cached"],
    [pages.granted, "granted"],
    [pages.pinned, "pinned"],
    [pages.quarantined, "quarantined"],
  ];
  const extras = more.filter(([value]) => value).map(([value, name]) => `${count(value)} ${name}`);
  const held = [`${count(used)} of ${count(total)} pages in use`, ...extras];
  if (member.preempted_sequences) held.push(`${count(member.preempted_sequences)} preempted`);
  if (member.paused_sequences) held.push(`${count(member.paused_sequences)} wait for their reader`);
  if (member.waiting_tokens) held.push(`${count(member.waiting_tokens)} prompt tokens to compute`);
  if (member.adapters?.length) held.push(`adapters ${member.adapters.join(", ")}`);
  say(part(child, "pages"), total ? held.join(" · ") : "pages are not told");
  child.setAttribute("aria-label", `${member.name || member.address}, ${state}, ${total ? percent(used / total) : "no"} pages in use`);
}

/** Shows the pools of a view. */
export function showPools(view) {
  keyed(
    byId("pools"),
    view.pools,
    (pool) => pool.role,
    (pool) =>
      el(
        "div",
        "pool",
        el("h3", "", pool.role === "prefill" ? "Prefill" : "Decode", named("count", el("span", "quiet"))),
        named("members", el("div", "members")),
      ),
    (child, pool) => {
      say(part(child, "count"), ` ${plural(pool.members.length, "member")}`);
      keyed(part(child, "members"), pool.members, (member) => `${member.name} ${member.address}`, card, update);
    },
  );
}
