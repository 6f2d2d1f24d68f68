// What the server says of itself, asked for once a second while the page is seen, and handed to whoever shows it.
import { byId } from "/ui/dom.js";
import { SOON_MS, ask } from "/ui/http.js";

const PERIOD_MS = 1000;
const listeners = [];
let wake = null;

// Called with the answer of /v1/status each time, and with null and a reason when there is none.
export function onStatus(listener) {
  listeners.push(listener);
}

// Ask now.
export function refresh() {
  wake?.();
}

export async function watch() {
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  for (;;) {
    if (!document.hidden) {
      let status = null;
      let reason = "";
      let word = "unreachable";
      try {
        status = await ask("/v1/status", undefined, { within: SOON_MS });
      } catch (error) {
        reason = error.message;
        if (error.code === "no_server") word = "no model";
      }
      badge(status?.status ?? word, reason);
      for (const listener of listeners) {
        try {
          listener(status, reason);
        } catch (error) { // a view that fails, perhaps over a server of another version, leaves the others
          reportError(error);
        }
      }
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, PERIOD_MS);
    });
  }
}

function badge(word, reason) {
  byId("state").textContent = word;
  byId("state").className = "badge " + word.replace(" ", "-");
  byId("state").title = reason;
  document.body.classList.toggle("stale", ["unreachable", "no model"].includes(word));
}
