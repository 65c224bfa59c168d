// One request at a time, streamed by the same door that programs use.

import { CallError, errorOf, events, fetched } from "./calls.js";
import { cancel, record } from "./detail.js";
import { byId, el, keyed, say } from "./dom.js";
import { count, duration, rate, word } from "./format.js";

/** A cancelled run whose stream has not ended by then is cut on this side. */
const CANCEL_MS = 3000;
const FIGURES_MS = 100;

const freshId = () => `ui-${[...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
const wanted = (text) => (text === "" ? undefined : Number(text));

/** The request that a filled-in form asks for. */
function requestOf(form, model) {
  const values = Object.fromEntries(new FormData(form));
  const chat = document.querySelector('input[name="mode"]:checked').value === "chat";
  const system = values.system ? [{ role: "system", content: values.system }] : [];
  const prompt = chat ? { messages: [...system, { role: "user", content: values.prompt }] } : { prompt: values.prompt };
  return {
    path: chat ? "../v1/chat/completions" : "../v1/completions",
    body: {
      model: values.model || model,
      ...prompt,
      max_tokens: wanted(values.max_tokens),
      temperature: wanted(values.temperature),
      top_p: wanted(values.top_p),
      seed: wanted(values.seed),
      stop: values.stop ? [values.stop] : undefined,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    },
  };
}

/** See the module. `open(id)` shows a record. */
export class Playground {
  constructor(open) {
    this.open = open;
    this.model = "";
    this.running = null;
    this.form = byId("play");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running) this.run();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    for (const input of document.querySelectorAll('input[name="mode"]')) {
      input.addEventListener("change", () => (byId("system-field").hidden = input.value !== "chat"));
    }
  }

  /** A view came: which model there is, and which adapters. */
  told(view) {
    this.model = view.model;
    const adapters = new Set(view.pools.flatMap((pool) => pool.members.flatMap((member) => member.adapters ?? [])));
    const options = [{ value: "", words: "none" }, ...[...adapters].sort().map((name) => ({ value: name, words: name }))];
    keyed(
      this.form.elements.model,
      options,
      (option) => option.value,
      (option) => {
        const made = el("option", "", option.words);
        made.value = option.value;
        return made;
      },
      () => {},
    );
  }

  async run() {
    const run = { id: freshId(), cut: new AbortController(), began: performance.now(), first: 0, last: 0, tokens: 0, end: "", stopped: false };
    this.running = run;
    byId("run").disabled = true;
    byId("stop").disabled = false;
    const output = byId("output");
    output.replaceChildren();
    output.classList.add("busy");
    this.figures(run);
    const timer = setInterval(() => this.figures(run), FIGURES_MS);
    try {
      await this.stream(run, output);
    } catch (error) {
      if (run.stopped) run.end ||= "cancelled";
      else output.append(el("span", "failed", error instanceof CallError ? error.message : "The connection to the router broke."));
    } finally {
      clearInterval(timer);
      this.running = null;
      output.classList.remove("busy");
      byId("run").disabled = false;
      byId("stop").disabled = true;
    }
    await this.ended(run);
  }

  async stream(run, output) {
    const { path, body } = requestOf(this.form, this.model);
    const headers = { "content-type": "application/json", "x-request-id": run.id };
    const answer = await fetched(path, { method: "POST", headers, body: JSON.stringify(body), signal: run.cut.signal });
    run.id = answer.headers.get("x-request-id") || run.id;
    const text = document.createTextNode("");
    output.append(text);
    for await (const data of events(answer)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorOf(chunk, 500);
      run.tokens = chunk.usage?.completion_tokens ?? run.tokens;
      for (const choice of chunk.choices ?? []) {
        const more = choice.text ?? choice.delta?.content ?? "";
        if (more) {
          run.first ||= performance.now();
          run.last = performance.now();
          const low = output.scrollHeight - output.scrollTop - output.clientHeight < 24;
          text.appendData(more);
          if (low) output.scrollTop = output.scrollHeight;
        }
        run.end = choice.finish_reason || run.end;
      }
    }
  }

  /** Cancels what runs; it ends with what it has. */
  stop() {
    const run = this.running;
    if (!run || run.stopped) return;
    run.stopped = true;
    byId("stop").disabled = true;
    cancel(run.id).catch(() => run.cut.abort());
    setTimeout(() => run.cut.abort(), CANCEL_MS);
  }

  /** What the record says goes before what was seen here. */
  async ended(run) {
    try {
      const one = await record(run.id);
      run.end = word(one.finish_reason, "FINISH_REASON_") === "unspecified" ? run.end : word(one.finish_reason, "FINISH_REASON_");
      run.tokens = one.usage?.returned_tokens ?? run.tokens;
    } catch {
      // It was refused, or the store is away: what was seen stands.
    }
    if (!this.running) this.figures(run);
  }

  figures(run) {
    const now = performance.now();
    const seconds = (run.last - run.first) / 1000;
    const rows = [
      { name: "First token", value: run.first ? duration((run.first - run.began) / 1000) : this.running ? duration((now - run.began) / 1000) : "–" },
      { name: "Tokens", value: count(run.tokens) },
      { name: "Tokens/s", value: seconds > 0.05 && run.tokens > 1 ? rate((run.tokens - 1) / seconds) : "–" },
      { name: "Ended by", value: run.end ? run.end.replaceAll("_", " ") : this.running ? "running" : "–" },
      { name: "Request", value: run.id, opens: true },
    ];
    keyed(
      byId("figures"),
      rows,
      (row) => row.name,
      (row) => {
        const value = el(row.opens ? "button" : "span", row.opens ? "link mono" : "value");
        if (row.opens) {
          value.type = "button";
          value.addEventListener("click", () => this.open(value.textContent));
        }
        return el("div", "", el("dt", "", row.name), el("dd", "", value));
      },
      (child, row) => say(child.querySelector("button, .value"), row.value),
    );
  }
}
