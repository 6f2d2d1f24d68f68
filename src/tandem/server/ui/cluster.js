// The state of the cluster, asked for once a second while the page is seen.
import { offer } from "/ui/chat.js";
import { element, request } from "/ui/http.js";

const PERIOD_MS = 1000;
const KEPT = 120;
const rates = [];
let last = null;

const byId = (id) => document.getElementById(id);
const gib = (bytes) => (bytes / 2 ** 30).toFixed(bytes < 2 ** 33 ? 2 : 0) + " GiB";

export function start() {
  tick();
}

async function tick() {
  if (!document.hidden) {
    try {
      draw(await (await request("/v1/status")).json());
    } catch (error) {
      byId("state").textContent = "unreachable";
      byId("state").className = "badge unreachable";
      byId("detail").textContent = error.message;
      byId("detail").hidden = false;
    }
  }
  setTimeout(tick, PERIOD_MS);
}

function draw(status) {
  const engine = status.engine;
  const loaded = status.models.filter((one) => one.loaded).map((one) => one.id);
  const several = status.models.length > 1;
  const name = several ? `${loaded.join(", ") || "no model"} (${loaded.length} of ${status.models.length} models loaded)`
    : status.model;
  byId("model").textContent = name;
  document.title = "Tandem: " + name;
  offer(status.models);
  byId("state").textContent = status.status;
  byId("state").className = "badge " + status.status;
  byId("detail").textContent = engine?.detail ?? "";
  byId("detail").hidden = !engine?.detail;
  note(engine);
  figures(status, engine);
  map(engine?.ranks ?? []);
  requests(status.requests);
}

function note(engine) {
  const now = performance.now();
  const total = engine?.generated_tokens ?? 0;
  if (last && engine && total >= last.total) rates.push((total - last.total) / ((now - last.at) / 1000));
  if (rates.length > KEPT) rates.shift();
  last = engine ? { total, at: now } : null;
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${i + KEPT - rates.length},${29 - (28 * rate) / top}`).join(" ");
  byId("spark").innerHTML = `<polyline points="${points}"/>`;
}

function figures(status, engine) {
  const share = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");
  const recent = rates.slice(-3);
  const shown = {
    "tokens/s": recent.length ? (recent.reduce((a, b) => a + b) / recent.length).toFixed(1) : "–",
    "first token, lately": engine?.ttft_s ? engine.ttft_s.toFixed(2) + " s" : "–",
    running: status.num_running,
    waiting: status.num_waiting,
    "KV cache": share(engine?.kv_tokens_used ?? 0, engine?.kv_tokens_total ?? 0),
    "prefix hits": share(engine?.prefix_hits ?? 0, engine?.prefix_queries ?? 0),
    restarts: engine?.restarts ?? 0,
    replicas: status.replicas.length,
  };
  byId("figures").replaceChildren(...Object.entries(shown).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function map(ranks) {
  const replicas = Map.groupBy(ranks, (rank) => rank.replica);
  byId("map").replaceChildren(...[...replicas].map(([number, members]) => {
    const stages = [...Map.groupBy(members, (rank) => rank.stage)].sort(([a], [b]) => a - b);
    const cells = stages.map(([stage, inside]) => element("div", { class: "stage" }, ...inside.map(
      (rank) => box(rank, stage, stages.length))));
    const joined = cells.flatMap((cell, i) => (i ? [element("span", { class: "link" }, "→"), cell] : [cell]));
    const title = replicas.size > 1 ? [element("h3", {}, "Replica " + number)] : [];
    return element("div", { class: "replica" }, ...title, ...joined);
  }));
}

function box(rank, stage, stages) {
  const held = rank.weight_bytes + rank.kv_bytes;
  const meter = element("meter", { min: 0, max: rank.memory_bytes || rank.peak_bytes || 1, value: held,
    "aria-label": `memory of rank ${rank.rank}` });
  const memory = rank.memory_bytes ? ` of ${gib(rank.memory_bytes)}` : "";
  return element("div", { class: "rank" },
    element("b", {}, `rank ${rank.rank} on ${rank.host}`),
    element("small", {}, `stage ${stage + 1}/${stages}, layers ${rank.layers[0]}–${rank.layers[1] - 1}, `
      + `${(1000 * rank.step_s).toFixed(1)} ms a step`),
    meter,
    element("small", {}, `weights ${gib(rank.weight_bytes)}, KV ${gib(rank.kv_bytes)}, `
      + `peak ${gib(rank.peak_bytes)}${memory}`));
}

function requests(list) {
  const rows = list.map((one) => {
    const button = element("button", { "aria-label": "Cancel " + one.request_id }, "Cancel");
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await request(`/v1/requests/${one.request_id}/cancel`, { method: "POST" });
      } catch (error) {
        button.replaceWith(error.message);
      }
    });
    return element("tr", {}, ...[one.request_id, one.route, one.elapsed_seconds.toFixed(1) + " s", one.prompt_tokens,
      one.completion_tokens].map((cell) => element("td", {}, String(cell))), element("td", {}, button));
  });
  const body = byId("requests").tBodies[0];
  // A button under the pointer is not replaced while its row stays.
  if (body.dataset.shown === JSON.stringify(list.map((one) => one.request_id)) && rows.length) {
    rows.forEach((row, i) => [2, 4].forEach((cell) => {
      body.rows[i].cells[cell].textContent = row.cells[cell].textContent;
    }));
    return;
  }
  body.dataset.shown = JSON.stringify(list.map((one) => one.request_id));
  body.replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { colspan: 6 }, "none"))]));
}
