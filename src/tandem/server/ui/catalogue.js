// Models on this disk, in the catalogue and on the hub: which fit, and downloads. On the page of an agent alone.
import { button, byId, element, gib, redraw } from "/ui/dom.js";
import { ask, ofAgent } from "/ui/http.js";
import { progress } from "/ui/models.js";
import * as begin from "/ui/start.js";
import { onStatus } from "/ui/status.js";

const EACH = 3; // looks at the server's state between two at the downloads' while none goes on
const ID = /^[\w.-]+\/[\w.-]+$/; // of the hub
let words = "";
let found = null; // { models, note, words } of the last search
let fetches = [];
let ticks = 0;
let looking = false;

export function start() {
  byId("catalogue").hidden = !ofAgent();
  byId("catalogue-none").hidden = ofAgent();
  if (!ofAgent()) return;
  byId("catalogue-form").addEventListener("submit", (event) => {
    event.preventDefault();
    words = byId("catalogue-words").value.trim();
    search();
  });
  onStatus(() => document.body.dataset.view === "models" && (ticks++ % EACH === 0 || fetches.some(goesOn)) && look());
}

export function opened() {
  if (ofAgent()) search();
}

const goesOn = (fetch) => fetch.state === "fetching";

function tell(text, error = false) {
  byId("catalogue-told").textContent = text;
  byId("catalogue-told").className = error ? "error" : "quiet";
}

async function search() {
  const [asked, hosts] = [words, begin.hosts()];
  tell("Searching …");
  try {
    const answer = await ask("/v1/agent/search", { model: asked, hosts });
    if (asked !== words) return; // another search has begun
    found = { ...answer, words: asked };
    const many = hosts.length > 1 ? `the ${hosts.length} machines chosen in Start, together` : "this machine";
    tell(`What fits is told for ${many}. ${answer.note[0].toUpperCase()}${answer.note.slice(1)}.`);
    draw();
  } catch (error) {
    if (asked === words) tell(error.message, true);
  }
}

// How far downloads are; one that has ended changes what is on this disk.
async function look() {
  if (looking) return;
  looking = true;
  try {
    const before = fetches.filter(goesOn).map((fetch) => fetch.model);
    fetches = (await ask("/v1/agent")).fetches.map((one) => {
      const state = one.exit_code === null ? "fetching" : one.exit_code ? "failed" : "fetched";
      return { ...one, state, error: state === "failed" ? one.said || "It has ended: fetch it again." : "" };
    });
    draw();
    if (fetches.some((fetch) => fetch.state === "fetched" && before.includes(fetch.model))) search();
  } catch (error) {
    tell(error.message, true);
  } finally {
    looking = false;
  }
}

async function act(name, model) {
  try {
    await ask("/v1/agent/" + name, { model });
    await look();
  } catch (error) {
    tell(error.message, true);
  }
}

function use(model) {
  byId("start-name").value = model;
  byId("tab-start").click();
  byId("start-name").focus();
}

function draw() {
  redraw(byId("fetches"), fetches.map((one) => [one.model, one.state, one.error]), () => fetches.map(fetched));
  for (const [place, one] of fetches.entries()) {
    if (goesOn(one)) byId("fetches").children[place].querySelector(".progress").replaceWith(bar(one));
  }
  if (!found) return;
  const states = fetches.map((one) => [one.model, one.state]);
  redraw(byId("catalogue-list"), [found, states], () => {
    const rows = [...found.models.filter((one) => one.on_disk), ...found.models.filter((one) => !one.on_disk)];
    const named = ID.test(found.words) && !rows.some((one) => one.id === found.words);
    return (named ? [{ name: "", id: found.words, bytes: 0, on_disk: false, fits: "size unknown" }, ...rows] : rows).map(row);
  });
}

// The buttons stay where they are while the bar moves.
const bar = (one) => progress(["fetch", one.model].join(), one.model === "demo" && one.total && one.completed >= one.total
  ? "checking and unpacking" : "download", one.completed, one.total);

function fetched(one) {
  const end = button(goesOn(one) ? "Cancel" : "Dismiss", () => act("cancel", one.model), { bare: false,
    "aria-label": `${goesOn(one) ? "Cancel" : "Dismiss"} ${one.model}` });
  const next = { failed: () => button("Fetch again", () => act("fetch", one.model), { bare: false }),
    fetched: () => button("Use", () => use(one.model), { bare: false, class: "primary" }) }[one.state];
  return element("li", { class: "card", "data-fetch": one.model }, element("div", { class: "model-head" },
    element("h4", {}, one.model), element("span", { class: "badge " + { failed: "failed", fetched: "loaded",
      fetching: "loading" }[one.state] }, one.state), next?.(), end),
  goesOn(one) ? bar(one) : null, one.error ? element("p", { class: "error", role: "alert" }, one.error) : null);
}

function row(one) {
  const going = fetches.find((fetch) => fetch.model === one.id && goesOn(fetch));
  const size = [one.on_disk ? "on this machine" : null, one.bytes ? gib(one.bytes) : null].filter(Boolean).join(", ");
  return element("li", { "data-model-id": one.id }, element("div", {}, element("b", {}, one.name || one.id),
    one.name && one.name !== one.id ? element("small", {}, one.id) : null), element("small", {}, size),
  element("span", { class: "badge " + (one.fits === "fits" ? "healthy" : one.fits.startsWith("does") ? "failed" : "") }, one.fits),
  going ? element("small", {}, "fetching") : one.on_disk
    ? button("Use", () => use(one.id), { bare: false, "aria-label": "Use " + one.id })
    : button("Fetch", () => act("fetch", one.id), { bare: false, "aria-label": "Fetch " + one.id }));
}
