// Calls to the router, with the access token of this tab, and streams of server-sent events.

const TOKEN = "tandem-token";

/** The token that goes with every call; empty: none. */
export const token = () => sessionStorage.getItem(TOKEN) || "";

/** Keeps a token until the tab is closed; an empty one forgets it. */
export function keepToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

/** An answer that is not 2xx, or an error in the middle of a stream. */
export class CallError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The error of an object {"error": {…}} as routers answer them. */
export function errorOf(body, status) {
  const told = (body && body.error) || {};
  return new CallError(told.status || status, told.message || `the router answered ${status}`, told.code || "");
}

/** Fetches from the router; `path` is relative to the page. Throws CallError for anything but 2xx. */
export async function fetched(path, options = {}) {
  const headers = { ...options.headers };
  if (token()) headers.authorization = `Bearer ${token()}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  let body = null;
  try {
    body = await answer.json();
  } catch {
    // Not one of ours: a proxy between, or the connection broke.
  }
  throw errorOf(body, answer.status);
}

/** The data of a call as JSON. */
export const json = async (path, options) => (await fetched(path, options)).json();

/** The data of each event of an answer, as text, until its end. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r\n", "\n");
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
