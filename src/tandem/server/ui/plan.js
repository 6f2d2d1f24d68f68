// The planner's table for the served model and any machines.
import { element, request } from "/ui/http.js";

const byId = (id) => document.getElementById(id);

export function start() {
  byId("planner").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      show(await (await request("/v1/plan?" + query())).json());
    } catch (error) {
      byId("answer").replaceChildren(element("p", { class: "error" }, error.message));
    }
  });
}

function query() {
  const wanted = new URLSearchParams();
  for (const host of byId("hosts").value.split(/\s+/).filter(Boolean)) wanted.append("hosts", host);
  for (const name of ["link", "context", "streams", "goal"]) {
    if (byId(name).value) wanted.append(name, byId(name).value);
  }
  return wanted;
}

function show(plan) {
  const head = ["Layout", "ms/token, 1 stream", "tokens/s, 1 stream", "tokens/s, all", "prompt tokens/s", "Why"];
  const rows = plan.candidates.slice(0, 30).map((one) => {
    const p = one.prediction;
    const cells = [one.label, p && (1000 * p.step_single).toFixed(1), p && p.tokens_single.toFixed(1),
      p && p.tokens.toFixed(1), p && p.prefill.toFixed(0), one.reason];
    const kind = one.label === plan.chosen ? "chosen" : one.fits ? "" : "unfit";
    return element("tr", { class: kind }, ...cells.map((cell) => element("td", {}, String(cell ?? "–"))));
  });
  byId("answer").replaceChildren(
    element("p", {}, plan.chosen ? "Best: " + plan.chosen : "Nothing fits."),
    ...[...plan.reasons, ...plan.notes, ...plan.remedies].map((line) => element("p", {}, line)),
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((name) => element("th", {}, name)))),
      element("tbody", {}, ...rows)),
    element("p", {}, "Estimates from nominal figures: good for comparing layouts, not a promise."));
}
