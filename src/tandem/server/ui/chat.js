// The view of conversations: which is shown, what is asked, and the answer as it comes.
import { button, byId, element, redraw } from "/ui/dom.js";
import { ask as fetchJson } from "/ui/http.js";
import { AssistantMessage, answerOf, thumbnail, userMessage } from "/ui/message.js";
import { snippets } from "/ui/snippets.js";
import { onStatus } from "/ui/status.js";
import * as store from "/ui/store.js";
import { chat, emptyAnswer, resume } from "/ui/stream.js";
import { settings, wishes } from "/ui/settings.js";

const EXAMPLES = [
  ["Explain", "Explain in three sentences how a large language model writes text."],
  ["Code", "Write a Python function that tells whether a text is a palindrome, with a short test."],
  ["Plan", "Plan a weekend in a city by the sea, as a table with times."],
  ["Mend", "Make this sentence simpler: The utilisation of said apparatus is not recommended."],
];
const NEAR_END = 60;
const SAVE_MS = 2000;
let all = [];
let talk = newTalk();
let running = null; // { talk, message, controller, saved }
let views = new Map(); // of messages that are shown
let following = true;
let frame = 0;
let limits = null;
let pictures = []; // of the message that is written, as data URIs

export async function start() {
  tellKept(await store.open(elsewhere));
  await settings.start();
  all = await store.talks();
  const wanted = await store.setting("open");
  show(all.find((one) => one.id === wanted) ?? talk);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("question").value);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask(byId("question").value);
    }
  });
  byId("question").addEventListener("input", fit);
  byId("question").addEventListener("paste", (event) => {
    if (take(event.clipboardData)) event.preventDefault();
  });
  byId("talk").addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  byId("talk").addEventListener("drop", (event) => {
    if (event.dataTransfer.files.length) event.preventDefault(); // the browser would leave the page for a file
    take(event.dataTransfer);
  });
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", fresh);
  byId("latest").addEventListener("click", toEnd);
  byId("chat-model").addEventListener("change", () => {
    settings.keep("model", model());
    drawEmpty();
  });
  byId("scroller").addEventListener("scroll", () => {
    const place = byId("scroller");
    following = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_END;
    byId("latest").hidden = following;
  });
  byId("forget").addEventListener("click", forget);
  byId("show-talks").addEventListener("click", () => drawer(true));
  byId("veil").addEventListener("click", () => drawer(false));
  window.addEventListener("pagehide", () => running && save(running.talk));
  onStatus((status) => status && offer(status));
  fit();
}

// --- which conversation ---

function newTalk() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2), title: "", changed: Date.now(), messages: [] };
}

// A new conversation, with the focus on its first message.
export function fresh() {
  if (talk.messages.length) show(newTalk());
  drawer(false);
  byId("question").focus();
}

function show(next) {
  talk = next;
  views = new Map();
  byId("messages").replaceChildren(...talk.messages.map(view));
  store.keepSetting("open", talk.id);
  drawEmpty();
  list();
  toEnd();
  buttons();
  if (running?.talk === talk) tellBusy("");
  else busy();
}

function view(message) {
  if (message.role === "user") {
    const made = userMessage(message, actions);
    views.set(message, { element: made });
    return made;
  }
  const made = new AssistantMessage(message, actions);
  views.set(message, made);
  made.update(running?.message !== message);
  return made.element;
}

function list() {
  const shown = all.map((one) => [one.id, one.title, one.id === talk.id]);
  redraw(byId("talk-list"), shown, () => all.map((one) => {
    const open = element("button", { class: "bare open", "aria-current": one.id === talk.id ? "true" : null, title: one.title },
      one.title || "New chat");
    open.addEventListener("click", () => {
      show(one);
      drawer(false);
    });
    return element("li", {}, open, button(`Delete ${one.title}`, () => drop(one), { symbol: "delete" }));
  }));
}

async function drop(one) {
  if (running?.talk === one) stop();
  all = all.filter((other) => other !== one);
  await store.dropTalk(one.id);
  if (one === talk) show(newTalk());
  else list();
}

async function forget() {
  if (!window.confirm("Delete all conversations in this browser?")) return;
  stop();
  all = [];
  await store.dropAll();
  byId("settings").close();
  show(newTalk());
}

function drawer(open) {
  byId("talks").classList.toggle("open", open);
  byId("veil").hidden = !open;
  byId("show-talks").setAttribute("aria-expanded", open);
}

async function save(one) {
  if (!all.includes(one)) return; // it was deleted while it was answered
  one.changed = Date.now();
  all.sort((a, b) => b.changed - a.changed);
  list();
  tellKept(await store.keepTalk(one));
}

function tellKept(kept) {
  byId("kept").textContent = kept ? "Conversations stay in this browser."
    : "This browser has no room for conversations: they are gone with the page.";
}

// Another tab has kept or dropped this conversation, or dropped all.
async function elsewhere(id) {
  const found = id === null ? undefined : await store.talk(id);
  all = all.filter((one) => one === running?.talk || (id !== null && one.id !== id));
  if (running?.talk.id === id) return;
  if (found) all = [found, ...all].sort((a, b) => b.changed - a.changed);
  if (talk !== running?.talk && talk.messages.length && (id === null || talk.id === id)) show(found ?? newTalk());
  else list();
}

// --- asking ---

const actions = {
  last: (message) => talk.messages.at(-1) === message,
  choose(message, which) {
    message.chosen = which;
    views.get(message).update(true);
    save(talk);
  },
  regenerate(message) {
    if (busy()) return;
    message.answers.push(emptyAnswer(model()));
    message.chosen = message.answers.length - 1;
    answer(message, chat);
  },
  resume(message) {
    if (busy()) return;
    answer(message, resume);
  },
  edit(message, text) {
    if (busy()) return;
    talk.messages.length = talk.messages.indexOf(message);
    show(talk);
    ask(text, message.pictures ?? []);
  },
};

// One answer is made at a time: true while one is, and the page says so.
function busy() {
  if (running) {
    tellBusy(running.talk === talk ? "The answer is not finished: stop it, or wait for its end."
      : `“${running.talk.title}” is being answered: stop that answer, or wait for its end.`);
  }
  return running !== null;
}

function tellBusy(text) {
  byId("busy").textContent = text;
  byId("busy").hidden = !text;
}

// The last answer once more.
export function again() {
  const last = talk.messages.at(-1);
  if (last?.role === "assistant") actions.regenerate(last);
}

export const model = () => byId("chat-model").value || "default";

// Pictures that were pasted or dropped; true if there were some.
function take(data) {
  const found = [...data.files].filter((file) => file.type.startsWith("image/"));
  for (const file of found) {
    const reader = new FileReader();
    reader.onload = () => drawPictures([...pictures, reader.result]);
    reader.readAsDataURL(file);
  }
  return found.length > 0;
}

function drawPictures(these) {
  pictures = these;
  byId("pictures").hidden = !these.length;
  byId("pictures").replaceChildren(...these.map((one, i) => element("span", {}, thumbnail(one, i),
    button(`Remove picture ${i + 1}`, () => drawPictures(pictures.filter((other, j) => j !== i)), { symbol: "delete" }))));
  buttons();
}

function ask(text, shown = null) {
  const question = text.trim();
  if (!(question || (shown ?? pictures).length) || busy()) return;
  const asked = { role: "user", content: question };
  if ((shown ?? pictures).length) asked.pictures = shown ?? pictures;
  if (!shown) drawPictures([]);
  byId("question").value = "";
  fit();
  talk.title ||= question.slice(0, 80).replace(/\s+/g, " ") || "Picture";
  const message = { role: "assistant", chosen: 0, answers: [emptyAnswer(model())] };
  if (!all.length) navigator.storage?.persist?.().catch(() => {}); // some browsers ask the person
  if (!all.includes(talk)) all.unshift(talk);
  talk.messages.push(asked, message);
  const before = talk.messages.at(-3);
  if (before) views.get(before)?.update?.(true); // it is the last one no more
  byId("messages").append(view(asked), view(message));
  drawEmpty();
  answer(message, chat);
}

async function answer(message, how) {
  const of = talk;
  const one = answerOf(message);
  const before = of.messages.slice(0, of.messages.indexOf(message));
  const silent = (other) => other?.role === "assistant" && !answerOf(other).content && !answerOf(other).reasoning;
  // A question that had no answer is left out with it: many chat templates want turns.
  const sent = before.filter((other, i) => !silent(other) && !silent(before[i + 1])).map((other) => (
    { role: other.role, content: other.role === "user" ? contentOf(other) : answerOf(other).content }));
  const system = settings.value("system").trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...sent];
  const wished = wishes();
  one.limit = wished.max_tokens;
  delete one.error;
  running = { talk: of, message, controller: new AbortController(), saved: Date.now() };
  buttons();
  toEnd();
  draw(false);
  save(of);
  byId("said").textContent = "The model answers.";
  try {
    await how(one.model = model(), messages, wished, one, running.controller.signal, changed);
  } catch (error) {
    if (error.name === "AbortError") one.finish = "stopped";
    else one.error = error.message;
  }
  cancelAnimationFrame(frame);
  frame = 0;
  running = null;
  tellBusy("");
  views.get(message)?.update(true);
  if (following) toEnd();
  byId("said").textContent = one.error ?? `Answer: ${one.content.slice(0, 2000)}`;
  buttons();
  if (one.error && !one.content && !one.reasoning && how === chat) giveBack(of, message);
  save(of);
}

const contentOf = ({ content, pictures: shown }) => (shown ? [{ type: "text", text: content },
  ...shown.map((url) => ({ type: "image_url", image_url: { url } }))] : content);

// Nothing came: the question goes back to where it was written.
function giveBack(of, message) {
  if (of !== talk || message.answers.length > 1 || byId("question").value || pictures.length) return;
  byId("question").value = of.messages.at(-2)?.content ?? "";
  drawPictures(of.messages.at(-2)?.pictures ?? []);
  fit();
}

function changed() {
  frame ||= requestAnimationFrame(() => draw(true));
  if (Date.now() - running.saved > SAVE_MS) {
    running.saved = Date.now();
    save(running.talk);
  }
}

// At most once a frame, however many tokens came.
function draw(scheduled) {
  if (scheduled) frame = 0;
  if (!running) return;
  views.get(running.message)?.update(false);
  if (following) toEnd();
}

export function stop() {
  running?.controller.abort();
}

function toEnd() {
  const place = byId("scroller");
  following = true;
  byId("latest").hidden = true;
  place.scrollTop = talk.messages.length ? place.scrollHeight : 0;
}

function buttons() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  byId("send").disabled = !byId("question").value.trim() && !pictures.length;
}

// The field for the message grows with it.
function fit() {
  const field = byId("question");
  field.style.height = "auto";
  field.style.height = Math.min(field.scrollHeight, 220) + "px";
  buttons();
}

// --- what there is ---

function offer(status) {
  const names = status.models.map((one) => [one.id, one.state]);
  const chosen = byId("chat-model").value || settings.value("model");
  redraw(byId("chat-model"), names, () => names.map(([name, state]) => element("option", { value: name,
    selected: name === chosen }, ["loaded", "unknown"].includes(state) ? name : `${name} (${state})`)));
  const engine = status.engine;
  const known = [model(), status.status, engine?.ranks?.length, engine?.max_context].join();
  if (known === limits) return;
  limits = known;
  byId("empty").dataset.facts = engine ? [`${engine.ranks.length} rank${engine.ranks.length === 1 ? "" : "s"}`,
    `${engine.max_context.toLocaleString("en")} tokens of context`].join(" · ") : "";
  if (engine?.state === "ready") settings.showDefaults(fetchJson("/model/info"));
  drawEmpty();
}

function drawEmpty() {
  const place = byId("empty");
  place.hidden = talk.messages.length > 0;
  if (place.hidden) return place.replaceChildren();
  const cards = EXAMPLES.map(([title, text]) => {
    const card = element("button", { type: "button", class: "example" }, element("b", {}, title), element("span", {}, text));
    card.addEventListener("click", () => ask(text));
    return card;
  });
  place.replaceChildren(
    element("h2", {}, "What would you like to know?"),
    element("p", { class: "quiet" }, [byId("chat-model").value, place.dataset.facts].filter(Boolean).join(" · ")),
    element("div", { class: "examples" }, ...cards),
    element("h3", {}, "Or from your own program"),
    snippets(model(), "empty"));
}
