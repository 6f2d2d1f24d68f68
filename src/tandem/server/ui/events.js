// What happened, the latest first, with the reason and what to do.
import { byId, element, redraw } from "/ui/dom.js";
import { SOON_MS, ask } from "/ui/http.js";
import { onStatus } from "/ui/status.js";

const SHOWN = 60;
let events = [];
let asking = false;

export function start() {
  onStatus((status) => status && look());
}

async function look() {
  if (asking) return;
  asking = true;
  try {
    const known = events[0];
    let found = await after(known ? known.number - 1 : 0);
    if (known && (found[0]?.number !== known.number || found[0].time !== known.time)) { // another server's history
      events = [];
      found = await after(0);
    }
    events = [...found.reverse(), ...events.slice(1)].slice(0, SHOWN);
  } catch {
    return; // said by the status
  } finally {
    asking = false;
  }
  redraw(byId("events"), events.map((one) => [one.number, one.time]), () => (events.length ? events.map(line)
    : [element("li", { class: "quiet" }, "Nothing yet.")]));
}

const after = async (number) => (await ask(`/v1/events?after=${number}`, undefined, { within: SOON_MS })).data;

function line(one) {
  const at = new Date(1000 * one.time);
  const today = at.toDateString() === new Date().toDateString();
  const shown = today ? at.toLocaleTimeString() : at.toLocaleString();
  const where = [one.model, one.replica ? `replica ${one.replica}` : null].filter(Boolean).join(", ");
  return element("li", { class: "event " + one.level }, element("time", { datetime: at.toISOString() }, shown),
    element("b", {}, one.kind.replaceAll("_", " ")), where ? element("span", { class: "quiet" }, where) : null,
    element("p", {}, one.text), one.remedy ? element("p", { class: "remedy" }, one.remedy) : null);
}
