// The list of conversations: which there are, their names, search, export, import, and a deletion that can be undone.
import { button, byId, element, redraw } from "/ui/dom.js";
import * as store from "/ui/store.js";

let all = [];
let removed = []; // by the last deletion
let renaming = null;
let view = null; // { shown, show, answering, stop, look }: the view of one conversation
const news = new Set(); // answered while another was read

// `view` tells and changes which conversation is shown. The one that was open last, or null.
export async function start(given) {
  view = given;
  tellKept(await store.open(elsewhere));
  all = await store.talks();
  byId("find").addEventListener("input", list);
  byId("undo").addEventListener("click", undo);
  byId("forget").addEventListener("click", forget);
  byId("export").addEventListener("click", () => write(all, "tandem-conversations"));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", read);
  const wanted = await store.setting("open");
  return all.find((one) => one.id === wanted) ?? null;
}

export function newTalk() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2), title: "", changed: Date.now(), messages: [] };
}

export function add(talk) {
  if (!all.length) navigator.storage?.persist?.().catch(() => {}); // some browsers ask the person
  if (!all.includes(talk)) all.unshift(talk);
}

export async function save(talk) {
  if (!all.includes(talk)) return; // it was deleted while it was answered
  talk.changed = Date.now();
  all.sort((a, b) => b.changed - a.changed);
  list();
  tellKept(await store.keepTalk(talk));
}

// An answer has ended in a conversation that is not the one shown.
export function tellNews(talk) {
  if (all.includes(talk)) news.add(talk.id);
}

function tellKept(kept) {
  byId("kept").textContent = kept ? "Conversations stay in this browser."
    : "This browser has no room for conversations: they are gone with the page.";
}

// --- the list ---

export function list() {
  const words = byId("find").value.trim().toLowerCase();
  const found = words ? all.filter((one) => (one.title + "\n" + texts(one.messages)).toLowerCase().includes(words)) : all;
  const facts = found.map((one) => [one.id, one.title, one === view.shown(), one === renaming, view.answering(one), news.has(one.id)]);
  redraw(byId("talk-list"), [words, facts], () => (found.length || !words ? found.map(row)
    : [element("li", { class: "quiet none" }, "No conversation has these words.")]));
  byId("find").hidden = all.length < 2 && !words;
}

// All that is said in messages, in other versions of a question too.
function texts(messages) {
  return messages.map((one) => (one.role === "user"
    ? [one.content, ...(one.versions ?? []).map((version) => version.content + "\n" + texts(version.rest))].join("\n")
    : one.answers.map((answer) => answer.content).join("\n"))).join("\n");
}

function row(one) {
  if (one === renaming) return element("li", {}, nameField(one));
  const shown = one === view.shown();
  if (shown) news.delete(one.id);
  const mark = view.answering(one) ? ["answering", "is being answered"] : news.has(one.id) ? ["news", "has a new answer"] : null;
  const open = element("button", { class: "bare open", "aria-current": shown ? "true" : null, title: one.title },
    one.title || "New chat");
  open.addEventListener("click", () => view.show(one));
  const name = one.title || "New chat";
  return element("li", {}, open, mark ? element("i", { class: mark[0], role: "img", "aria-label": mark[1], title: mark[1] }) : null,
    element("span", { class: "acts" },
      button(`Rename ${name}`, () => rename(one), { symbol: "edit" }),
      button(`Export ${name}`, () => write([one], name), { symbol: "down" }),
      button(`Delete ${name}`, () => drop(one), { symbol: "delete" })));
}

function rename(one) {
  renaming = one;
  list();
  byId("talk-list").querySelector("input")?.select();
}

function nameField(one) {
  const field = element("input", { "aria-label": "Name of the conversation", value: one.title, maxlength: 80 });
  const end = (keep) => {
    if (renaming !== one) return;
    renaming = null;
    const name = field.value.trim();
    if (keep && name && name !== one.title) {
      one.title = name;
      save(one);
    }
    list();
  };
  field.addEventListener("keydown", (event) => {
    if (!["Enter", "Escape"].includes(event.key) || event.isComposing) return;
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  return field;
}

// --- deletion ---

async function drop(one) {
  view.stop(one);
  all = all.filter((other) => other !== one);
  offerUndo([one], `“${one.title}” is deleted.`);
  if (one === view.shown()) view.show(newTalk());
  else list();
  await store.dropTalk(one.id);
}

async function forget() {
  if (!window.confirm("Delete all conversations in this browser?")) return;
  all.forEach(view.stop);
  offerUndo(all, "All conversations are deleted.");
  all = [];
  byId("settings").close();
  view.show(newTalk());
  await store.dropAll();
}

function offerUndo(gone, text) {
  removed = gone;
  byId("undo-bar").hidden = !gone.length;
  byId("undo-text").textContent = text;
}

async function undo() {
  const back = removed.filter((one) => !all.some((other) => other.id === one.id)); // some may have been imported again
  offerUndo([], "");
  all = [...all, ...back].sort((a, b) => b.changed - a.changed);
  if (back.length === 1) view.show(back[0]);
  else list();
  for (const one of back) tellKept(await store.keepTalk(one));
}

// Another tab has kept or dropped this conversation, or dropped all.
async function elsewhere(id) {
  if (id !== null) await view.look(id);
  const found = id === null ? undefined : await store.talk(id);
  const shown = view.shown();
  const mine = all.find((one) => one.id === id);
  if (mine && view.answering(mine)) return;
  all = all.filter((one) => view.answering(one) || (id !== null && one.id !== id));
  if (found) all = [found, ...all].sort((a, b) => b.changed - a.changed);
  if (!view.answering(shown) && shown.messages.length && (id === null || shown.id === id)) view.show(found ?? newTalk());
  else list();
}

// --- files ---

function write(talks, name) {
  const text = JSON.stringify({ tandem_conversations: 1, talks }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) + ".json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// Conversations of a file come in beside those that are here; one that is here already is left as it is.
async function read() {
  const [file] = byId("import-file").files;
  byId("import-file").value = "";
  if (!file) return;
  let talks = [];
  try {
    const found = JSON.parse(await file.text()).talks.filter(store.whole);
    talks = [...new Map(found.map((one) => [one.id, one])).values()];
  } catch {
    // No JSON, or another's, or nested deeper than anything that this page writes.
  }
  const fresh = talks.filter((one) => !all.some((other) => other.id === one.id));
  byId("import-told").textContent = !talks.length ? `${file.name} holds no conversations that this page has exported.`
    : `${fresh.length} conversation${fresh.length === 1 ? "" : "s"} added` + (talks.length > fresh.length
      ? `, ${talks.length - fresh.length} ${talks.length - fresh.length === 1 ? "is" : "are"} here already.` : ".");
  all = [...all, ...fresh].sort((a, b) => b.changed - a.changed);
  list();
  for (const one of fresh) tellKept(await store.keepTalk(one));
}
