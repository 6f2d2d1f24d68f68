// What the person set: sampling, system prompt, model. Kept in this browser; empty means that the server chooses.
import { byId } from "/ui/dom.js";
import * as store from "/ui/store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS];
let values = {};

export const settings = {
  async start() {
    values = (await store.setting("settings")) ?? {};
    for (const name of FIELDS) {
      byId(name).value = values[name] ?? "";
      byId(name).addEventListener("input", () => settings.keep(name, byId(name).value));
    }
    byId("defaults").addEventListener("click", () => {
      for (const name of FIELDS) {
        byId(name).value = "";
        delete values[name];
      }
      store.keepSetting("settings", values);
    });
    byId("open-settings").addEventListener("click", () => byId("settings").showModal());
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

// Fields of a request: those that are set.
export function wishes() {
  const set = NUMBERS.filter((name) => byId(name).value.trim() !== "");
  return Object.fromEntries(set.map((name) => [name, Number(byId(name).value)]));
}
