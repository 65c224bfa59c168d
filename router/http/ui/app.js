// Puts the page together: one stream of views, shown by its parts.

import { keepToken, token } from "./calls.js";
import { showCell } from "./cell.js";
import { Detail } from "./detail.js";
import { byId, say } from "./dom.js";
import { Playground } from "./playground.js";
import { showPools } from "./pools.js";
import { showRequests } from "./requests.js";
import { Watch } from "./watch.js";

const detail = new Detail();
const open = (requestId) => detail.open(requestId);
const playground = new Playground(open);

function view(seen) {
  showCell(seen);
  showPools(seen);
  showRequests(seen, open);
  playground.told(seen);
}

function link(state, words, why = "") {
  const pill = byId("link");
  pill.className = `pill ${state}`;
  say(pill, words);
  const notice = byId("notice");
  say(notice, why);
  notice.hidden = !why;
  document.body.classList.toggle("old", state !== "live");
}

const watch = new Watch({ view, link });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && document.body.classList.contains("old")) watch.again();
});

const access = byId("access-dialog");
byId("access").addEventListener("click", () => {
  byId("token").value = token();
  access.showModal();
});
byId("access-form").addEventListener("submit", () => {
  keepToken(byId("token").value.trim());
  watch.again();
});
byId("access-forget").addEventListener("click", () => {
  keepToken("");
  access.close();
  watch.again();
});
