// What the person set: sampling, system prompts, tools, model, presets. Kept in this browser; empty means that the server chooses.
import { button, byId, element } from "/ui/dom.js";
import * as store from "/ui/store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS, "stops", "tools"];
const THINKING = { off: { enable_thinking: false }, on: { enable_thinking: true }, low: { reasoning_effort: "low" },
  medium: { reasoning_effort: "medium" }, high: { reasoning_effort: "high" } };
let values = {};
let presets = {};

export const settings = {
  async start() {
    values = (await store.setting("settings")) ?? {};
    presets = (await store.setting("presets")) ?? {};
    if (typeof values !== "object") values = {};
    for (const name of FIELDS) byId(name).addEventListener("input", () => settings.keep(name, byId(name).value));
    byId("tools").addEventListener("input", checkTools);
    byId("thinking").value = settings.value("thinking");
    byId("thinking").addEventListener("change", () => settings.keep("thinking", byId("thinking").value));
    byId("defaults").addEventListener("click", () => fill({}));
    byId("keep-preset").addEventListener("click", keepPreset);
    byId("open-settings").addEventListener("click", () => byId("settings").showModal());
    show();
    drawPresets();
  },

  value: (name) => String(values[name] ?? ""),

  keep(name, value) {
    values = { ...values, [name]: value };
    store.keepSetting("settings", values);
  },

  // The server's own choices stand in the empty fields.
  async showDefaults(asked) {
    try {
      const info = await asked;
      const given = info.default_sampling_params ?? {};
      for (const name of NUMBERS.filter((one) => one !== "seed")) {
        byId(name).placeholder = given[name] ?? (name === "max_tokens" ? info.max_tokens : "default");
      }
    } catch {
      // Only hints.
    }
  },
};

function show() {
  for (const name of FIELDS) byId(name).value = settings.value(name);
  checkTools();
}

function fill(given) {
  values = { ...values, ...Object.fromEntries(FIELDS.map((name) => [name, given[name] ?? ""])) };
  store.keepSetting("settings", values);
  show();
}

// --- presets: the fields of the settings under a name ---

function keepPreset() {
  const name = byId("preset-name").value.trim();
  if (!name) return byId("preset-name").focus();
  presets = { ...presets, [name]: Object.fromEntries(FIELDS.map((field) => [field, settings.value(field)])) };
  byId("preset-name").value = "";
  store.keepSetting("presets", presets);
  drawPresets();
}

function drawPresets() {
  byId("presets").replaceChildren(...Object.entries(presets).map(([name, given]) => element("span", { class: "file" },
    button(name, () => fill(given)), button(`Delete preset ${name}`, () => {
      delete presets[name];
      store.keepSetting("presets", presets);
      drawPresets();
    }, { symbol: "delete" }))));
}

// --- what a request says of them ---

function tools() {
  const text = byId("tools").value.trim();
  if (!text) return null;
  const found = JSON.parse(text);
  if (!Array.isArray(found)) throw new Error("not a list");
  return found.map((one) => (one.type ? one : { type: "function", function: one }));
}

function checkTools() {
  let wrong = "";
  try {
    tools();
  } catch (error) {
    wrong = `Tools: ${error.message}. Write a list, as in [{"name": "weather", "parameters": {"type": "object"}}].`;
  }
  byId("tools-told").textContent = wrong;
  byId("tools").setCustomValidity(wrong);  // keeps the dialog open
  byId("tools").setAttribute("aria-invalid", Boolean(wrong));
}

// Fields of a request: those that are set.
export function wishes() {
  const set = NUMBERS.filter((name) => byId(name).value.trim() !== "");
  const stop = settings.value("stops").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  let given = null;
  try {
    given = tools();
  } catch {
    // Said beside the field.
  }
  return { ...Object.fromEntries(set.map((name) => [name, Number(byId(name).value)])), ...(stop.length ? { stop } : {}),
    ...(byId("thinking").parentElement.hidden ? {} : THINKING[byId("thinking").value]), ...(given?.length ? { tools: given } : {}) };
}
