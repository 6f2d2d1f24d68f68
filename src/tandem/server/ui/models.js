// The models of the server: loaded or not, how far loading is, what memory they take; load and unload.
import { button, byId, element, gib, redraw, sized } from "/ui/dom.js";
import { ask } from "/ui/http.js";
import { onStatus, refresh } from "/ui/status.js";

const PHASES = { fetch: "download", load: "load into memory", check: "self-check" };
const errors = new Map();
const asked = new Set();
const paces = new Map(); // of downloads and loads: bytes and time of the first look

export function start() {
  onStatus((status) => status && draw(status));
}

function draw(status) {
  const several = status.models.length > 1;
  const budget = Object.entries(status.budget);
  const total = (name) => status.models.filter((one) => one.loaded || one.state === "loading")
    .reduce((sum, one) => sum + (one.needs?.[name] ?? 0), 0);
  redraw(byId("budget"), [budget, budget.map(([name]) => total(name))], () => budget.map(([name, bytes]) => element("div",
    { class: "card budget" }, element("b", {}, name), bar(total(name), bytes, `memory for models on ${name}`),
    element("small", {}, `${gib(total(name))} of ${gib(bytes)} for models`))));
  redraw(byId("model-cards"), [status.models, [...asked], [...errors], several ? null : held(status.engine)], () =>
    status.models.map((one) => card(one, status, several)));
}

const held = (engine) => (engine?.ranks ?? []).map((rank) => [gib(rank.weight_bytes), gib(rank.kv_bytes), rank.state]);

function bar(part, whole, label, kv = 0) {
  const share = (kind, bytes) => sized(element("span", { class: kind }), { width: Math.min((100 * bytes) / (whole || 1), 100) + "%" });
  return element("div", { class: "memory", role: "img", "aria-label": `${label}: ${gib(part + kv)} of ${gib(whole)}` },
    share("weights", part), share("kv", kv));
}

function rankBar(rank) {
  const whole = rank.memory_bytes || rank.peak_bytes;
  return element("div", {}, element("small", {}, `rank ${rank.rank} on ${rank.host}: weights ${gib(rank.weight_bytes)}, `
    + `KV ${gib(rank.kv_bytes)} of ${gib(whole)}`), bar(rank.weight_bytes, whole, `memory of rank ${rank.rank}`, rank.kv_bytes));
}

function card(one, status, several) {
  const needs = Object.entries(one.needs ?? {});
  const engine = several ? null : status.engine;
  const facts = [
    ["context", one.max_model_len ? `${one.max_model_len.toLocaleString("en")} tokens` : null],
    ["memory", needs.length ? needs.map(([name, bytes]) => `${gib(bytes)} on ${name}`).join(", ") : engine
      ? gib(engine.ranks.reduce((sum, rank) => sum + rank.weight_bytes + rank.kv_bytes, 0)) + ` on ${engine.ranks.length} rank(s)`
      : null],
    ["stays in memory", one.keep ? "always" : one.unload_after ? `${one.unload_after} s after the last request`
      : several ? "until another needs the room" : null],
    ["loading took", engine?.load_s ? `${engine.load_s.toFixed(1)} s` : null],
    ["speculation", engine?.speculation || null],
    ["prefix cache", engine?.prefix_cache || null],
    ["running, waiting", one.waiting || one.running ? `${one.running ?? 0}, ${one.waiting ?? 0}` : null],
  ].filter(([, value]) => value);
  const busy = asked.has(one.id) || ["loading", "unloading", "starting"].includes(one.state);
  const act = !several ? null : one.loaded || one.state === "recovering"
    ? button("Unload", () => tell(one.id, "unload"), { bare: false, disabled: busy || one.keep,
      "aria-label": "Unload " + one.id, title: one.keep ? "It is kept (--pinned-models)" : null })
    : button("Load", () => tell(one.id, "load"), { bare: false, class: "primary", disabled: busy, "aria-label": "Load " + one.id });
  const share = engine ? engine.ranks.map(rankBar)
    : needs.map(([name, bytes]) => bar(bytes, status.budget[name] ?? bytes, `memory of ${one.id} on ${name}`));
  return element("article", { class: "card model", "data-model": one.id }, element("div", { class: "model-head" },
    element("h3", {}, one.id), element("span", { class: "badge " + one.state }, one.state), act),
  ...share, one.detail ? element("p", { class: one.state === "failed" ? "error" : "quiet" }, one.detail) : null,
  errors.has(one.id) ? element("p", { class: "error", role: "alert" }, errors.get(one.id)) : null,
  ...one.loading.map((rank) => progress([one.id, rank.rank, rank.phase].join(),
    `rank ${rank.rank}: ${PHASES[rank.phase] ?? rank.phase}`, rank.done, rank.total)),
  element("dl", { class: "facts" }, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name),
    element("dd", {}, value)))));
}

// A bar with size, pace and time left; `key` tells one download or load from another.
export function progress(key, label, done, total) {
  const now = performance.now();
  if (!(paces.get(key)?.done <= done)) paces.set(key, { done, at: now });
  const first = paces.get(key);
  const pace = now > first.at + 500 ? (1000 * (done - first.done)) / (now - first.at) : 0;
  const left = pace > 0 && done < total ? `, ${Math.ceil((total - done) / pace)} s left` : "";
  const size = total ? `${gib(done)} of ${gib(total)}` + (pace ? ` at ${gib(pace)}/s${left}` : "") : "";
  return element("label", { class: "progress" }, element("span", {}, label, " ", element("small", {}, size)),
    element("progress", total ? { max: total, value: done } : {}));
}

async function tell(name, what) {
  asked.add(name);
  errors.delete(name);
  refresh();
  try {
    await ask(`/v1/models/${encodeURIComponent(name)}/${what}`, {});
  } catch (error) {
    errors.set(name, error.message);
  } finally {
    asked.delete(name);
    refresh();
  }
}
