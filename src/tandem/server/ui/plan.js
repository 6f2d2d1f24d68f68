// The planner: machines from lists, layouts compared, memory and layers to scale, and the command to run.
import { button, byId, copyButton, element, gib, redraw, sized } from "/ui/dom.js";
import { ask } from "/ui/http.js";
import { onStatus } from "/ui/status.js";

const SIZES = [8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512];
const SHOWN = 12;
let chips = [];
let most = 8;
let ready = null;

export function start() {
  byId("planner").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  byId("add-machine").addEventListener("click", () => {
    const names = [...byId("machines").querySelectorAll("input")].map((one) => one.value.trim());
    add([..."abcdefghijklmnopqrstuvwxyz"].find((name) => !names.includes(name)), 64, "m4-max").querySelector("input").focus();
  });
  onStatus((status) => {
    if (!status) return;
    const names = status.models.map((one) => one.id);
    byId("plan-model-label").hidden = names.length < 2;
    redraw(byId("plan-model"), names, () => names.map((name) => element("option", {}, name)));
  });
}

// The lists come from the server, when the view is opened first.
export function opened() {
  ready ??= fill().catch((error) => {
    ready = null;
    byId("answer").replaceChildren(element("p", { class: "error" }, error.message));
  });
}

async function fill() {
  const choices = await ask("/v1/plan/choices");
  chips = choices.chips.map((one) => one.name);
  most = choices.max_hosts;
  byId("link").replaceChildren(...choices.links.map((one) => element("option", { value: one.name,
    selected: one.name === "thunderbolt5-tcp" }, `${one.name} (${(one.bandwidth / 1e9).toFixed(1)} GB/s)`)));
  byId("goal").append(...choices.goals.map((one) => element("option", { value: one }, one)));
  const here = hosts((await ask("/v1/status")).engine?.ranks ?? []);
  const given = here.length ? here.slice(0, most) : [["a", 64], ["b", 128]];
  byId("machines-told").textContent = here.length ? "The machines of this cluster; say which chips they have."
    : "Two machines as an example.";
  for (const [name, size] of given) add(name, size, "m4-max");
}

// The memory of each host, once, however many ranks it has.
function hosts(ranks) {
  const found = new Map(ranks.filter((rank) => rank.memory_bytes).map((rank) => [rank.host.replace(/[^\w.-]/g, "-"),
    Math.round(rank.memory_bytes / 2 ** 30)]));
  return [...found].filter(([name, size]) => name && size);
}

function add(name, size, chip) {
  const pick = (values, chosen, label, words) => {
    const list = element("select", { "aria-label": label });
    list.append(...values.map((value) => element("option", { value, selected: value === chosen }, words(value))));
    return list;
  };
  const row = element("div", { class: "machine" }, element("input", { "aria-label": "Name", value: name, size: 10 }),
    pick([...new Set([...SIZES, size])].sort((a, b) => a - b), size, "Memory", (value) => `${value} GB`), pick(chips, chip, "Chip", (value) => value),
    button("Remove", () => {
      row.remove();
      count();
    }, { symbol: "delete" }));
  byId("machines").append(row);
  count();
  return row;
}

function count() {
  byId("add-machine").disabled = byId("machines").children.length >= most;
}

function query() {
  const wanted = new URLSearchParams();
  for (const row of byId("machines").children) {
    const [name, size, chip] = [...row.querySelectorAll("input, select")].map((one) => one.value.trim());
    wanted.append("hosts", `${name}=${size}GB:${chip}`);
  }
  if (!wanted.size) throw new Error("Add a machine first.");
  for (const name of ["link", "context", "streams", "goal"]) {
    if (byId(name).value) wanted.append(name, byId(name).value);
  }
  if (!byId("plan-model-label").hidden) wanted.append("model", byId("plan-model").value);
  return wanted;
}

async function compare() {
  byId("answer").setAttribute("aria-busy", "true");
  try {
    show(await ask("/v1/plan?" + query()));
  } catch (error) {
    byId("answer").replaceChildren(element("p", { class: "error", role: "alert" }, error.message));
  } finally {
    byId("answer").removeAttribute("aria-busy");
  }
}

function show(plan) {
  const best = plan.candidates.find((one) => one.label === plan.chosen);
  const lines = (list) => list.map((line) => element("li", {}, line));
  byId("answer").replaceChildren(...[
    element("h3", {}, best ? "Best: " + best.label : "Nothing fits."),
    best ? chosen(plan, best) : element("ul", { class: "card lines" }, ...lines([...plan.reasons, ...plan.remedies])),
    element("h3", {}, "All layouts"),
    element("div", { class: "card scroll" }, table(plan)),
    best ? element("ul", { class: "lines quiet" }, ...lines(plan.notes)) : null,
    element("p", { class: "quiet" }, "Estimates from published figures: good for comparing layouts, not a promise."),
  ].filter(Boolean));
}

function chosen(plan, best) {
  const largest = Math.max(...best.prediction.memory.map((one) => one.budget), 1);
  const replicas = best.replicas.map((stages) => element("div", { class: "layers", role: "img", "aria-label": "Layers: "
    + stages.map((one) => `${one.machines.join(" and ")} ${one.layers[1] - one.layers[0]}`).join(", ") },
  ...stages.map((one, i) => sized(element("span", { class: "stage-" + (i % 6) },
    `${one.machines.join(" + ")}: ${one.layers[0]}–${one.layers[1] - 1}`), { "flex-grow": one.layers[1] - one.layers[0] }))));
  const memory = best.prediction.memory.map((one) => element("div", { class: "plan-memory" },
    element("b", {}, one.machine),
    sized(element("div", { class: "memory", role: "img", "aria-label": `memory of ${one.machine}: ${gib(one.needed)} of `
      + gib(one.budget) }, part("weights", one.weights, one.budget), part("kv", one.kv, one.budget),
    part("rest", one.needed - one.weights - one.kv, one.budget)), { width: (100 * one.budget) / largest + "%" }),
    element("small", {}, `${gib(one.needed)} of ${gib(one.budget)}: weights ${gib(one.weights)}, KV ${gib(one.kv)}`)));
  const command = plan.commands.join("\n");
  const pre = element("pre", { tabindex: 0, "aria-label": "Command" }, command);
  return element("div", { class: "card chosen" }, ...replicas, ...memory,
    element("ul", { class: "lines" }, ...plan.reasons.map((line) => element("li", {}, line))),
    element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, "to serve it so"),
      copyButton(() => command, "Copy command", { text: true })), pre));
}

const part = (kind, bytes, whole) => sized(element("span", { class: kind }), { width: Math.min((100 * Math.max(bytes, 0)) / whole, 100) + "%" });

function table(plan) {
  const several = plan.streams > 1;
  const head = ["Layout", "Layers", "Memory", "ms/token", "tokens/s", ...(several ? [`tokens/s, ${plan.streams} streams`] : []),
    "prompt tokens/s", "Why"];
  const rows = plan.candidates.slice(0, SHOWN).map((one) => {
    const p = one.prediction;
    const layers = one.replicas[0]?.map((stage) => stage.layers[1] - stage.layers[0]).join(" + ");
    const memory = p?.memory.map((each) => `${each.machine} ${gib(each.needed)}`).join(", ");
    const cells = [one.label, layers, memory, p && (1000 * p.step_single).toFixed(1), p && p.tokens_single.toFixed(1),
      ...(several ? [p && p.tokens.toFixed(1)] : []), p && p.prefill.toFixed(0), one.reason];
    const kind = one.label === plan.chosen ? "chosen" : one.fits ? null : "unfit";
    return element("tr", { class: kind }, ...cells.map((cell) => element("td", {}, String(cell || "–"))));
  });
  return element("table", { class: "layouts" }, element("thead", {}, element("tr", {}, ...head.map((name) =>
    element("th", { scope: "col" }, name)))), element("tbody", {}, ...rows));
}
