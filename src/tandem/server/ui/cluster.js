// The cluster as it is: figures, ranks to scale with the links between them, requests in flight.
import { button, byId, element, gib, redraw, sized } from "/ui/dom.js";
import { ask } from "/ui/http.js";
import { onStatus } from "/ui/status.js";

const KEPT = 120;
const SLOW = 3;
const rates = [];
let last = null;

export function start() {
  onStatus((status, reason) => (status ? draw(status) : tell("error", reason + " What is shown is how it was before.")));
}

function draw(status) {
  const engine = status.engine;
  const loaded = status.models.filter((one) => one.loaded).map((one) => one.id);
  const several = status.models.length > 1;
  const name = several ? `${loaded.join(", ") || "no model"} (${loaded.length} of ${status.models.length} loaded)` : status.model;
  byId("model").textContent = name;
  document.title = "Tandem: " + name;
  tell(status.status === "healthy" ? "warning" : "error", engine?.degraded || engine?.detail || trouble(status));
  note(engine);
  figures(status, engine);
  map(engine);
  requests(status.requests);
}

const trouble = (status) => status.replicas.map((one) => one.detail).find(Boolean) ?? "";

function tell(kind, text) {
  byId("detail").textContent = text ?? "";
  byId("detail").className = "note " + kind;
  byId("detail").hidden = !text;
}

function note(engine) {
  const now = performance.now();
  const total = engine?.generated_tokens ?? 0;
  if (last && engine && total >= last.total) rates.push((total - last.total) / ((now - last.at) / 1000));
  if (rates.length > KEPT) rates.shift();
  last = engine ? { total, at: now } : null;
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${i + KEPT - rates.length},${29 - (28 * rate) / top}`);
  const first = KEPT - rates.length;
  byId("spark").innerHTML = points.length > 1 ? `<polygon points="${first},29 ${points.join(" ")} ${KEPT - 1},29"/>`
    + `<polyline points="${points.join(" ")}"/>` : "";
  byId("spark-top").textContent = rates.some(Boolean) ? `at most ${top.toFixed(0)}` : "";
}

const HINTS = {
  "KV cache": "Keys and values of tokens that are kept for running requests",
  "prefix hits": "Requests whose prompt began as an earlier one, which was not computed again",
  restarts: "Times that ranks were replaced",
};

function figures(status, engine) {
  const share = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");
  const recent = rates.slice(-3);
  const shown = {
    "tokens/s": recent.length ? (recent.reduce((a, b) => a + b) / recent.length).toFixed(1) : "–",
    "first token": engine?.ttft_s ? engine.ttft_s.toFixed(2) + " s" : "–",
    running: status.num_running,
    waiting: status.num_waiting,
    "KV cache": share(engine?.kv_tokens_used ?? 0, engine?.kv_tokens_total ?? 0),
    "prefix hits": share(engine?.prefix_hits ?? 0, engine?.prefix_queries ?? 0),
    restarts: engine?.restarts ?? 0,
    replicas: status.replicas.length,
  };
  redraw(byId("figures"), shown, () => Object.entries(shown).map(([name, value]) => element("div", { title: HINTS[name] },
    element("dt", {}, name), element("dd", {}, String(value)))));
}

// --- ranks ---

const health = (rank) => (rank.state !== "ready" ? rank.state : rank.slowdown >= SLOW ? "slow" : "well");

function map(engine) {
  const ranks = engine?.ranks ?? [];
  // Every second another number: only what can be seen counts.
  const facts = ranks.map((rank) => [rank.replica, rank.rank, rank.stage, rank.host, rank.layers, health(rank),
    rank.slowdown.toFixed(1), (1000 * rank.step_s).toFixed(1), (1000 * rank.handoff_s).toFixed(1), gib(rank.kv_bytes),
    gib(rank.peak_bytes), gib(rank.used_bytes), rank.memory_bytes]);
  redraw(byId("map"), [engine?.num_layers, facts, ranks.length ? "" : waiting(engine)], () => (ranks.length ? drawMap(engine, ranks) : [element("p", { class: "quiet" }, waiting(engine))]));
}

const waiting = (engine) => (engine ? engine.detail || "The ranks are not there." : "No engine answers.");

function drawMap(engine, ranks) {
  const most = Math.max(...ranks.map((rank) => rank.memory_bytes || rank.peak_bytes), 1);
  const layers = engine.num_layers || Math.max(...ranks.map((rank) => rank.layers[1]));
  const replicas = Map.groupBy(ranks, (rank) => rank.replica);
  return [...replicas].map(([number, members]) => {
    const stages = [...Map.groupBy(members, (rank) => rank.stage)].sort(([a], [b]) => a - b);
    const strip = element("div", { class: "layers", role: "img", "aria-label": "Layers: " + stages.map(([stage, [one]]) =>
      `stage ${stage + 1} has ${one.layers[1] - one.layers[0]}`).join(", ") }, ...stages.map(([stage, inside]) => {
      const [from, to] = inside[0].layers;
      return sized(element("span", { class: "stage-" + (stage % 6) }, to - from > layers / 12 ? `${from}–${to - 1}` : ""),
        { "flex-grow": to - from });
    }));
    const cells = stages.flatMap(([stage, inside], i) => {
      const cell = element("div", { class: "stage" }, ...inside.map((rank) => box(rank, stage, stages.length, most)));
      return i ? [link(inside), cell] : [cell];
    });
    const title = replicas.size > 1 ? element("h4", {}, "Replica " + number) : null;
    return element("div", { class: "replica card" }, title, strip, element("div", { class: "stages" }, ...cells));
  });
}

// What joins two stages, with the time that hidden states take over it.
function link(inside) {
  const seconds = Math.max(...inside.map((rank) => rank.handoff_s));
  const pace = seconds ? `${(1000 * seconds).toFixed(1)} ms` : "–";
  const told = seconds ? `Hidden states take ${pace} from stage to stage (median of the last steps)` : "Not measured yet";
  return element("div", { class: "link", title: told }, element("span", { class: "hidden" }, told),
    element("b", { "aria-hidden": "true" }, pace), element("i", { "aria-hidden": "true" }));
}

function box(rank, stage, stages, most) {
  const state = health(rank);
  const word = { well: "", slow: `${rank.slowdown.toFixed(1)}× slower`, lost: "lost", waiting: "waiting" }[state] ?? state;
  const whole = rank.memory_bytes || rank.peak_bytes || 1;
  const weights = sized(element("span", { class: "weights" }), { width: (100 * rank.weight_bytes) / whole + "%" });
  const kv = sized(element("span", { class: "kv" }), { width: (100 * rank.kv_bytes) / whole + "%" });
  const other = Math.max((rank.used_bytes || rank.peak_bytes) - rank.weight_bytes - rank.kv_bytes, 0);
  const rest = sized(element("span", { class: "rest" }), { width: (100 * Math.min(other, whole)) / whole + "%" });
  const told = `weights ${gib(rank.weight_bytes)}, KV ${gib(rank.kv_bytes)}, peak ${gib(rank.peak_bytes)}`
    + (rank.memory_bytes ? ` of ${gib(rank.memory_bytes)}` : "");
  const bar = sized(element("div", { class: "memory", role: "img", "aria-label": `memory of rank ${rank.rank}: ${told}` },
    weights, kv, rest), { width: Math.max(100 * (whole / most), 4) + "%" });
  return element("div", { class: "rank " + state },
    element("div", { class: "rank-head" }, element("b", {}, `rank ${rank.rank} on ${rank.host}`),
      word ? element("span", { class: "mark" }, word) : null),
    element("small", {}, element("i", { class: "dot stage-" + (stage % 6) }), `stage ${stage + 1}/${stages}, layers `
      + `${rank.layers[0]}–${rank.layers[1] - 1}, ${(1000 * rank.step_s).toFixed(1)} ms a step`),
    bar, element("small", {}, told));
}

// --- requests ---

function requests(list) {
  const body = byId("requests").tBodies[0];
  redraw(body, list.map((one) => one.request_id), () => (list.length ? list.map(row)
    : [element("tr", {}, element("td", { colspan: 5, class: "quiet" }, "none"))]));
  // A button under the pointer stays while its row does.
  list.forEach((one, i) => {
    body.rows[i].cells[1].textContent = one.elapsed_seconds.toFixed(1) + " s";
    body.rows[i].cells[3].textContent = one.completion_tokens;
  });
}

function row(one) {
  const cancel = button("Cancel", async () => {
    cancel.disabled = true;
    try {
      await ask(`/v1/requests/${encodeURIComponent(one.request_id)}/cancel`, {});
    } catch (error) {
      cancel.replaceWith(error.message);
    }
  }, { bare: false, "aria-label": "Cancel " + one.request_id });
  const short = one.request_id.length > 18 ? one.request_id.slice(0, 17) + "…" : one.request_id;
  return element("tr", {}, element("td", { title: `${one.request_id}, ${one.route}` }, short, element("br"),
    element("small", {}, one.route)), element("td"), element("td", {}, String(one.prompt_tokens)), element("td"),
  element("td", {}, cancel));
}
