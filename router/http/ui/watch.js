// The stream of views, taken up again whenever it breaks.

import { CallError, errorOf, events, fetched } from "./calls.js";

const PERIOD_S = 1;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;
/** A stream that is silent for so long is taken for broken. */
const SILENCE_MS = 8000;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * Watches for as long as the page is open. `told.view(view)` gets each view; `told.link(state, words)` hears about the
 * connection: "live", "wait" (trying again) or "denied" (the router wants another token).
 */
export class Watch {
  constructor(told) {
    this.told = told;
    this.wait = FIRST_WAIT_MS;
    this.broken = new AbortController();
    this.run();
  }

  /** Begins anew at once: with another token, or when the page is looked at again. */
  again() {
    this.wait = 0;
    this.broken.abort();
    this.wake?.();
  }

  async run() {
    for (;;) {
      this.broken = new AbortController();
      try {
        await this.follow(this.broken);
        this.told.link("wait", "reconnecting");
      } catch (error) {
        if (error instanceof CallError && (error.status === 401 || error.status === 403)) {
          this.told.link("denied", "needs a token", error.message);
        } else {
          const why = error instanceof CallError ? error.message : "The router does not answer; this page tries again by itself.";
          this.told.link("wait", "reconnecting", why);
        }
      }
      await Promise.race([pause(this.wait), new Promise((resolve) => (this.wake = resolve))]);
      this.wait = Math.min(LONGEST_WAIT_MS, Math.max(FIRST_WAIT_MS, this.wait * 2));
    }
  }

  async follow(broken) {
    let timer = setTimeout(() => broken.abort(), SILENCE_MS);
    try {
      const answer = await fetched(`api/cell?period=${PERIOD_S}`, { signal: broken.signal });
      for await (const data of events(answer)) {
        clearTimeout(timer);
        timer = setTimeout(() => broken.abort(), SILENCE_MS);
        const view = JSON.parse(data);
        if (view.error) throw errorOf(view, 503);
        this.wait = FIRST_WAIT_MS;
        this.told.link("live", "live");
        this.told.view(view);
      }
    } finally {
      clearTimeout(timer);
    }
  }
}
