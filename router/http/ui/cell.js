// What is true of the whole cell: figures, queue, budgets, routers.

import { bar, byId, el, keyed, named, part, say } from "./dom.js";
import { count, duration, percent, plural, rate } from "./format.js";

/** Pages that somebody needs, and all of them, of some members. */
export function pagesOf(members) {
  let used = 0;
  let total = 0;
  for (const { pages } of members) {
    if (!pages) continue;
    const all = Object.values(pages).reduce((sum, value) => sum + value, 0);
    used += all - pages.free - pages.cached;
    total += all;
  }
  return { used, total };
}

const sum = (members, field) => members.reduce((all, member) => all + (member[field] || 0), 0);
const ofPool = (view, role) => view.pools.find((pool) => pool.role === role)?.members ?? [];

function tiles(view) {
  const decode = ofPool(view, "decode");
  const prefill = ofPool(view, "prefill");
  const computing = prefill.length ? prefill : decode.filter((member) => member.computes_prompts);
  const pages = pagesOf(decode);
  return [
    { name: "Running", value: count(sum(decode, "running_sequences")), more: `of ${count(sum(decode, "max_sequences"))} seats` },
    { name: "Waiting", value: count(view.queue.requests), more: `${count(view.queue.tokens)} prompt tokens` },
    { name: "Output", value: rate(sum(decode, "tokens_per_s")), more: "tokens a second" },
    {
      name: "Prompts",
      value: prefill.length ? rate(sum(prefill, "tokens_per_s")) : count(sum(computing, "waiting_tokens")),
      more: prefill.length ? "tokens a second" : "tokens to compute",
    },
    {
      name: "KV in use",
      value: pages.total ? percent(pages.used / pages.total) : "–",
      more: `${count(pages.used)} of ${count(pages.total)} pages`,
    },
    { name: "Ended", value: count(view.ended_requests), more: "at this router" },
  ];
}

function showTiles(view) {
  keyed(
    byId("tiles"),
    tiles(view),
    (tile) => tile.name,
    (tile) => el("div", "tile", el("span", "name", tile.name), named("value", el("strong")), named("more", el("span", "quiet"))),
    (child, tile) => {
      say(part(child, "value"), tile.value);
      say(part(child, "more"), tile.more);
    },
  );
}

function gauge(child, name, used, limit, words) {
  say(part(child, "name"), name);
  say(part(child, "words"), words);
  const share = limit ? used / limit : 0;
  const level = share >= 0.95 ? "full" : share >= 0.75 ? "high" : "fine";
  bar(part(child, "bar"), [{ name: level, value: Math.min(used, limit), title: `${name}: ${words}` }], limit);
}

const gaugeRow = () =>
  el(
    "div",
    "gauge",
    el("div", "line", named("name", el("span")), named("words", el("span", "quiet"))),
    named("bar", el("div", "bar")),
  );

function showQueue(view) {
  const { queue } = view;
  const lanes = queue.lanes.map((lane) => ({
    key: `lane ${lane.priority}`,
    name: `Priority ${lane.priority}`,
    used: lane.requests,
    words: `${count(lane.requests)}, oldest ${duration(lane.oldest_s)}`,
  }));
  const all = {
    key: "all",
    name: "All",
    used: queue.requests,
    words: `${plural(queue.requests, "request")} of ${count(queue.max_requests)}`,
  };
  keyed(
    byId("queue"),
    [all, ...lanes],
    (row) => row.key,
    gaugeRow,
    (child, row) => gauge(child, row.name, row.used, row.key === "all" ? queue.max_requests : queue.requests, row.words),
  );
}

function showBudgets(view) {
  const rows = view.budgets.map((one) => ({
    key: `${one.resource}:${one.scope}:${one.name}`,
    name: `${one.resource === "pages" ? "Pages" : "Prompt tokens"} of ${one.name || "the cell"}`,
    used: Number(one.used),
    limit: Number(one.limit),
  }));
  keyed(
    byId("budgets"),
    rows,
    (row) => row.key,
    gaugeRow,
    (child, row) => gauge(child, row.name, row.used, row.limit, `${count(row.used)} of ${count(row.limit)}`),
  );
}

function showRouters(view) {
  keyed(
    byId("routers"),
    view.routers,
    (router) => router.name,
    () => el("div", "line", named("name", el("span", "mono")), named("words", el("span", "quiet"))),
    (child, router) => {
      say(part(child, "name"), router.name);
      say(part(child, "words"), router.tells ? "this one" : router.address);
    },
  );
}

/** Shows a view. */
export function showCell(view) {
  say(byId("model"), view.model);
  say(byId("router"), view.router + (view.draining ? ", draining" : "") + (view.store_available ? "" : ", store away"));
  showTiles(view);
  showQueue(view);
  showBudgets(view);
  showRouters(view);
}
