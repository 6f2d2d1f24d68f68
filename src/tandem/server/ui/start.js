// The view of what comes before a server: machines found, paired and checked, a model, its layouts, start and stop.
import { button, byId, element, gib, redraw, sized } from "/ui/dom.js";
import { ask, ofAgent } from "/ui/http.js";
import { onStatus, refresh } from "/ui/status.js";

const SHOWN = 3;
const HERE = "127.0.0.1";
const EACH = 3; // looks at the server's state between two at the machine's
let machines = [];
const chosen = new Set(); // hosts that take part
let ready = false;
let ticks = 0;
let looking = false;

export function start() {
  if (!ofAgent()) return;
  byId("start-find").addEventListener("click", (event) => during(event.target, "Finding …", () => find()));
  byId("start-pair").addEventListener("submit", (event) => {
    event.preventDefault();
    during(byId("start-pair").querySelector("button"), "Pairing …", async () => {
      await act("pair", { agent: byId("start-address").value.trim(), code: byId("start-code").value });
      byId("start-pair").reset();
      await find(0);
    });
  });
  byId("start-check").addEventListener("click", (event) => during(event.target, "Checking …", check));
  byId("start-form").addEventListener("submit", (event) => {
    event.preventDefault();
    during(event.submitter ?? byId("start-form").querySelector(".primary"), "Comparing …", compare);
  });
  byId("start-search").addEventListener("click", () => {
    byId("tab-models").click();
    byId("catalogue-words").focus();
  });
  ready = true;
  if (document.body.dataset.view === "start") opened();
  onStatus(() => document.body.dataset.view === "start" && ticks++ % EACH === 0 && look());
}

export function opened() {
  if (!ready) return; // it is shown first, and begins in a moment
  look();
  if (!machines.length) byId("start-find").click();
}

const act = (name, body = {}) => ask("/v1/agent/" + name, body);

// A button that says what it does meanwhile; what goes wrong stands beside the state of all.
async function during(one, word, work) {
  if (one.ariaBusy === "true") return; // it is at it
  const label = one.textContent;
  one.ariaBusy = "true";
  one.textContent = word;
  tell("");
  try {
    await work();
  } catch (error) {
    tell(error.message);
  } finally {
    one.ariaBusy = "false";
    one.textContent = label;
  }
}

function tell(text) {
  byId("start-now").replaceChildren(...(text ? [element("p", { class: "note error", role: "alert" }, text)] : []));
}

// --- what runs, and what is on this machine ---

async function look() {
  if (looking) return;
  looking = true;
  try {
    const state = await ask("/v1/agent");
    drawState(state);
    redraw(byId("start-model"), state.models, () => (state.models.length ? state.models.map((one) =>
      element("option", { value: one.name }, `${one.name.split("/").slice(-2).join("/")} (${gib(one.bytes)})`))
      : [element("option", { value: "" }, "none yet")]));
  } catch (error) {
    byId("start-state").textContent = error.message;
  } finally {
    looking = false;
  }
}

function drawState(state) {
  redraw(byId("start-state"), [state.runs, state.model, state.ended], () => {
    if (state.runs) {
      const stop = button("Stop", () => during(stop, "Stopping …", async () => {
        await act("stop");
        refresh();
        await look();
      }), { bare: false });
      return [element("b", {}, state.model ?? "A model"), " runs, or is being loaded: the views Models and Cluster show how far it is. ", stop];
    }
    const log = state.ended.length ? element("details", {}, element("summary", {}, "The last lines of the last server's log"),
      element("pre", {}, state.ended.join("\n"))) : null;
    return ["No model runs.", log].filter(Boolean);
  });
}

// --- machines ---

// Listen for machines; after a pairing those that are paired are asked alone.
async function find(seconds = 3) {
  const found = await act("machines", { seconds });
  const names = found.map((one) => one.name);
  machines = [...found, ...machines.filter((one) => !seconds && !names.includes(one.name) && !one.paired)];
  for (const one of machines.filter((each) => each.host === HERE && !chosen.size)) chosen.add(one.host);
  drawMachines();
}

function drawMachines() {
  byId("start-machines").replaceChildren(...machines.map((one) => {
    const facts = `${gib(one.memory_bytes)}, ${one.chip || "unknown chip"}, ${one.host === HERE ? "this machine" : one.address}`;
    const told = element("small", {}, facts);
    if (!one.paired) return element("li", {}, element("b", {}, one.name), told, pairForm(one));
    const box = element("input", { type: "checkbox" });
    box.checked = chosen.has(one.host);
    box.addEventListener("change", () => (box.checked ? chosen.add(one.host) : chosen.delete(one.host)));
    return element("li", {}, element("label", {}, box, one.name), told, one.host === HERE ? null
      : button("Forget", (event) => during(event.target, "Forgetting …", async () => {
        await act("forget", { agent: one.name });
        chosen.delete(one.host);
        await find(0);
      }), { "aria-label": `Forget ${one.name}` }));
  }));
}

function pairForm(one) {
  const code = element("input", { inputmode: "numeric", maxlength: 7, required: true, pattern: "\\s*(\\d\\s?){6}",
    placeholder: "000 000", title: "Six digits", "aria-label": `Code that ${one.name} shows` });
  const send = element("button", {}, "Pair");
  const form = element("form", {}, code, send, element("small", {}, "Type the six digits that tandem agent shows there."));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    during(send, "Pairing …", async () => {
      await act("pair", { agent: one.name, code: code.value });
      chosen.add(one.host);
      await find(0);
    });
  });
  return form;
}

// Hosts that are chosen, for other views.
export const hosts = () => machines.filter((one) => chosen.has(one.host)).map((one) => one.host);

// Machines that take part, in the order of the list.
function taking() {
  const found = machines.filter((one) => chosen.has(one.host));
  if (!found.length) throw new Error("Choose a machine first.");
  return found;
}

async function check() {
  const seen = await act("doctor", { hosts: taking().map((one) => one.host) });
  const lines = seen.findings.filter((one) => one.verdict !== "skip").map((one) => element("li", { class: one.verdict },
    element("b", {}, one.verdict), [one.check, one.where, one.detail].filter(Boolean).join(": "),
    one.remedy ? element("small", {}, " " + one.remedy) : null));
  byId("start-findings").replaceChildren(...lines);
}

// --- layouts ---

async function compare() {
  const model = byId("start-name").value.trim() || byId("start-model").value;
  if (!model) throw new Error("Choose a model, or name one to download: demo is a small one.");
  const parts = taking();
  const plan = await act("plan", { model, hosts: parts.map((one) => one.plan), context: Number(byId("start-context").value) || 8192,
    streams: Number(byId("start-streams").value) || 1 });
  const fitting = plan.candidates.filter((one) => plan.flags[one.label]).slice(0, SHOWN);
  byId("start-layouts").replaceChildren(...(fitting.length ? fitting.map((one) => layout(model, parts, plan, one))
    : [element("div", { class: "card" }, element("h4", {}, `${model} does not fit.`),
      element("ul", { class: "lines" }, ...[...plan.reasons, ...plan.remedies].map((line) => element("li", {}, line))))]));
}

function layout(model, parts, plan, one) {
  const best = one.label === plan.chosen;
  const memory = one.prediction.memory.map((each) => element("div", {},
    element("small", {}, `${each.machine}: ${gib(each.needed)} of ${gib(each.budget)}`),
    element("div", { class: "memory", role: "img", "aria-label": `memory of ${each.machine}` },
      sized(element("span", { class: "weights" }), { width: Math.min((100 * each.needed) / each.budget, 100) + "%" }))));
  const order = one.replicas.flatMap((stages) => stages.flatMap((stage) => stage.machines));
  const go = button("Start", () => during(go, "Starting …", async () => {
    const hosts = order.map((name) => parts.find((part) => part.name === name).host);
    await act("start", { model, hosts, flags: plan.flags[one.label] });
    refresh();
    await look();
  }), { bare: false, class: best ? "primary" : null, "aria-label": `Start ${one.label}` });
  return element("div", { class: "card layout" }, element("h4", {}, one.label + (best ? " · best" : "")),
    element("p", {}, `Fits: ${one.prediction.tokens_single.toFixed(0)} tokens/s for one stream (an estimate).`), ...memory,
    element("small", {}, best ? plan.reasons[0] : one.reason), go);
}
