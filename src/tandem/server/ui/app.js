// Which view is shown, the API key, light or dark. Each view is a module of its own.
import { start as startChat } from "/ui/chat.js";
import { start as startCluster } from "/ui/cluster.js";
import { start as startPlan } from "/ui/plan.js";

const tabs = [...document.querySelectorAll('[role="tab"]')];

function show(tab) {
  for (const one of tabs) {
    const chosen = one === tab;
    one.setAttribute("aria-selected", chosen);
    one.tabIndex = chosen ? 0 : -1;
    document.getElementById(one.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", "#" + tab.getAttribute("aria-controls"));
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}
show(tabs.find((tab) => "#" + tab.getAttribute("aria-controls") === location.hash) ?? tabs[0]);

const root = document.documentElement;
root.dataset.theme = localStorage.getItem("theme") ?? "";
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});

startCluster();
startChat();
startPlan();
