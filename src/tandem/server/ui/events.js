// What happened, the latest first, with the reason and what to do.
import { byId, element, redraw } from "/ui/dom.js";
import { ask } from "/ui/http.js";
import { onStatus } from "/ui/status.js";

const SHOWN = 60;
let events = [];
let last = 0;
let asking = false;

export function start() {
  onStatus((status) => status && look());
}

async function look() {
  if (asking) return;
  asking = true;
  try {
    let answer = await ask(`/v1/events?after=${last}`);
    if (answer.last < last) { // another server: its history begins anew
      events = [];
      answer = await ask("/v1/events");
    }
    events = [...answer.data.reverse(), ...events].slice(0, SHOWN);
    last = answer.last;
  } catch {
    return; // said by the status
  } finally {
    asking = false;
  }
  redraw(byId("events"), events.map((one) => one.number), () => (events.length ? events.map(line)
    : [element("li", { class: "quiet" }, "Nothing yet.")]));
}

function line(one) {
  const at = new Date(1000 * one.time);
  const today = at.toDateString() === new Date().toDateString();
  const shown = today ? at.toLocaleTimeString() : at.toLocaleString();
  const where = [one.model, one.replica ? `replica ${one.replica}` : null].filter(Boolean).join(", ");
  return element("li", { class: "event " + one.level }, element("time", { datetime: at.toISOString() }, shown),
    element("b", {}, one.kind.replaceAll("_", " ")), where ? element("span", { class: "quiet" }, where) : null,
    element("p", {}, one.text), one.remedy ? element("p", { class: "remedy" }, one.remedy) : null);
}
