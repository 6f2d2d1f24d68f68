// Which view is shown, light or dark, the keyboard. Each view is a module of its own.
import * as catalogue from "/ui/catalogue.js";
import * as chat from "/ui/chat.js";
import * as cluster from "/ui/cluster.js";
import { byId } from "/ui/dom.js";
import * as events from "/ui/events.js";
import { ofAgent } from "/ui/http.js";
import * as models from "/ui/models.js";
import * as plan from "/ui/plan.js";
import { snippets } from "/ui/snippets.js";
import * as begin from "/ui/start.js";
import { onStatus, watch } from "/ui/status.js";
import * as store from "/ui/store.js";

byId("tab-start").hidden = !ofAgent();
const tabs = [...document.querySelectorAll('nav [role="tab"]:not([hidden])')];
const nameOf = (tab) => tab.getAttribute("aria-controls");
let chosen = false;

function show(tab) {
  for (const one of tabs) {
    one.setAttribute("aria-selected", one === tab);
    one.tabIndex = one === tab ? 0 : -1;
    byId(nameOf(one)).hidden = one !== tab;
  }
  document.body.dataset.view = nameOf(tab);
  history.replaceState(null, "", "#" + nameOf(tab));
  if (nameOf(tab) === "plan") plan.opened();
  if (nameOf(tab) === "start") begin.opened();
  if (nameOf(tab) === "models") catalogue.opened();
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    chosen = true;
    show(tab);
  });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -place, End: tabs.length - 1 - place }[event.key];
    if (step === undefined) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });
}
const named = tabs.find((tab) => "#" + nameOf(tab) === location.hash) ?? (location.hash.startsWith("#key=") ? byId("tab-start") : undefined);
chosen = named !== undefined;
show(named ?? tabs[0]);

// Whoever opens the page comes to chat, unless something is amiss.
onStatus((status) => {
  if (status && !chosen && ["failed", "recovering"].includes(status.status)) show(byId("tab-cluster"));
  if (status) chosen = true;
});

const root = document.documentElement;
byId("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  store.keepSetting("theme", root.dataset.theme);
});

byId("connect").addEventListener("click", () => {
  byId("clients-snippets").replaceChildren(snippets(chat.model(), "dialog"));
  byId("clients").showModal();
});
byId("keys").addEventListener("click", () => byId("shortcuts").showModal());

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const writing = event.target.closest("input, textarea, select");
  const sign = writing && /^(Mac|iP)/.test(navigator.platform); // there Option with a letter writes another: ~ or @
  const act = event.altKey && !event.ctrlKey && !event.metaKey && !sign ? {
    KeyN: () => {
      byId("tab-chat").click();
      chat.fresh();
    },
    KeyR: chat.again,
    ...Object.fromEntries(tabs.map((tab, i) => [`Digit${i + 1}`, () => {
      tab.click();
      tab.focus();
    }])),
  }[event.code] : event.key === "Escape" ? chat.escape : writing || event.ctrlKey || event.metaKey ? null : {
    "/": () => {
      byId("tab-chat").click();
      byId("question").focus();
    },
    "?": () => byId("shortcuts").showModal(),
  }[event.key];
  if (!act) return;
  if (event.key !== "Escape") event.preventDefault();
  act();
});

cluster.start();
events.start();
models.start();
plan.start();
begin.start();
catalogue.start();
await chat.start();
root.dataset.theme ??= (await store.setting("theme")) ?? "";
if (document.body.dataset.view === "chat" && matchMedia("(hover: hover)").matches) byId("question").focus();
document.body.dataset.ready = "yes";
watch();
