// The view of conversations: which is shown, what is asked, and the answer as it comes.
import * as answers from "/ui/answers.js";
import * as attachments from "/ui/attachments.js";
import { fork, turn } from "/ui/branches.js";
import { byId, element, redraw } from "/ui/dom.js";
import { ask as fetchJson } from "/ui/http.js";
import { AssistantMessage, answerOf, userMessage } from "/ui/message.js";
import { drawMeter } from "/ui/meter.js";
import { settings } from "/ui/settings.js";
import { snippets } from "/ui/snippets.js";
import { onStatus } from "/ui/status.js";
import * as store from "/ui/store.js";
import { chat, emptyAnswer, resume } from "/ui/stream.js";
import * as talks from "/ui/talks.js";

const EXAMPLES = [
  ["Explain", "Explain in three sentences how a large language model writes text."],
  ["Code", "Write a Python function that tells whether a text is a palindrome, with a short test."],
  ["Plan", "Plan a weekend in a city by the sea, as a table with times."],
  ["Rewrite", "Make this sentence simpler: The utilisation of said apparatus is not recommended."],
];
const NEAR_END = 60;
let talk = talks.newTalk();
let views = new Map(); // of messages that are shown
let following = true;
let limits = null;
let longest = 0; // tokens that the model takes

export async function start() {
  answers.start({ began, drawn, ended, save: talks.save });
  const opened = await talks.start({ shown: () => talk, show: open, answering: (one) => Boolean(answers.runIn(one)),
    stop: answers.stopIn, look: answers.look });
  await settings.start();
  attachments.start(buttons);
  show(opened ?? talk);
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
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", fresh);
  byId("latest").addEventListener("click", toEnd);
  byId("chat-model").addEventListener("change", () => {
    settings.keep("model", model());
    drawEmpty();
  });
  byId("talk-system").addEventListener("input", () => {
    talk.system = byId("talk-system").value;
    talks.save(talk);
  });
  byId("scroller").addEventListener("scroll", () => {
    const place = byId("scroller");
    following = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_END;
    byId("latest").hidden = following;
  });
  byId("show-talks").addEventListener("click", () => drawer(true));
  byId("veil").addEventListener("click", () => drawer(false));
  window.addEventListener("pagehide", () => answers.everyRun().forEach((run) => talks.save(run.talk)));
  onStatus((status) => status && offer(status));
  fit();
}

// --- which conversation ---

// A new conversation, with the focus on its first message.
export function fresh() {
  if (talk.messages.length) show(talks.newTalk());
  drawer(false);
  byId("question").focus();
}

function open(next) {
  show(next);
  drawer(false);
}

function show(next) {
  talk = next;
  views = new Map();
  byId("messages").replaceChildren(...talk.messages.map(view));
  byId("talk-system").value = talk.system ?? "";
  store.keepSetting("open", talk.id);
  answers.look(talk.id);
  drawEmpty();
  talks.list();
  toEnd();
  buttons();
  tellBusy("");
  drawMeter(talk, longest);
}

function view(message) {
  if (message.role === "user") {
    const made = userMessage(message, actions);
    views.set(message, { element: made });
    return made;
  }
  const made = new AssistantMessage(message, actions);
  views.set(message, made);
  made.update(answers.runIn(talk)?.message !== message);
  return made.element;
}

function drawer(shown) {
  byId("talks").classList.toggle("open", shown);
  byId("veil").hidden = !shown;
  byId("show-talks").setAttribute("aria-expanded", shown);
}

// --- asking ---

const actions = {
  last: (message) => talk.messages.at(-1) === message,
  choose(message, step) {
    message.chosen += step;
    views.get(message).update(true);
    talks.save(talk);
  },
  regenerate(message) {
    if (busy()) return;
    message.answers.push(emptyAnswer(model()));
    message.chosen = message.answers.length - 1;
    answers.run(talk, message, chat, model());
  },
  resume(message) {
    if (busy()) return;
    answers.run(talk, message, resume, model());
  },
  // The results of an answer's calls go to the model, which goes on.
  results() {
    if (!busy()) next();
  },
  edit(message, text) {
    if (busy()) return;
    fork(talk, message, text);
    show(talk);
    next();
  },
  turn(message, step) {
    if (busy()) return;
    turn(talk, message, step);
    show(talk);
    talks.save(talk);
  },
};

// True if no answer can begin here now, and the page says why.
function busy() {
  const why = answers.refusal(talk);
  tellBusy(why);
  return Boolean(why);
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

function ask(text) {
  const question = text.trim();
  if (!(question || attachments.some()) || attachments.busy() || busy()) return;
  byId("question").value = "";
  fit();
  const files = attachments.taken();
  talk.title ||= question.slice(0, 80).replace(/\s+/g, " ") || files[0].name;
  const asked = { role: "user", content: question, ...(files.length ? { files } : {}) };
  talks.add(talk);
  talk.messages.push(asked);
  byId("messages").append(view(asked));
  next();
}

// Another answer behind the last message.
function next() {
  const before = talk.messages.findLast((one) => one.role === "assistant");
  const message = answers.nextAnswer(model());
  talk.messages.push(message);
  if (before) views.get(before)?.update(true); // it is the last one no more
  byId("messages").append(view(message));
  drawEmpty();
  answers.run(talk, message, chat, model());
}

function began(run) {
  talks.list();
  if (run.talk !== talk) return;
  buttons();
  toEnd();
  drawn(run);
  byId("said").textContent = "The model answers.";
}

function drawn(run) {
  if (run.talk !== talk) return;
  views.get(run.message)?.update(false);
  if (following) toEnd();
}

function ended(run, how) {
  const answer = answerOf(run.message);
  tellBusy("");
  if (run.talk !== talk) {
    talks.tellNews(run.talk);
    byId("said").textContent = `“${run.talk.title}” is answered.`;
    return;
  }
  views.get(run.message)?.update(true);
  if (following) toEnd();
  byId("said").textContent = answer.error ?? `Answer: ${answer.content.slice(0, 2000)}`;
  buttons();
  drawMeter(talk, longest);
  if (answer.error && !answer.content && !answer.reasoning && how === chat) giveBack(run.message);
}

// Nothing came: the question goes back to where it was written.
function giveBack(message) {
  const question = talk.messages.at(-2);
  if (message.answers.length > 1 || byId("question").value || question?.role !== "user") return;
  byId("question").value = question.content;
  attachments.back(question.files ?? []);
  fit();
}

// Escape: an edit ends, or else the answer.
export function escape() {
  const edits = document.querySelectorAll(".editing .cancel");
  if (edits.length) edits.forEach((one) => one.click());
  else stop();
}

function stop() {
  answers.stopIn(talk);
}

function toEnd() {
  const place = byId("scroller");
  following = true;
  byId("latest").hidden = true;
  place.scrollTop = talk.messages.length ? place.scrollHeight : 0;
}

function buttons() {
  const running = Boolean(answers.runIn(talk));
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  const wait = attachments.busy() ? "A file is being read" : byId("question").value.trim() || attachments.some() ? "" : "Write something first";
  byId("send").disabled = Boolean(wait);
  byId("send").title = wait || "Send (Enter)";
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
  const room = status.models.find((one) => one.id === model())?.max_model_len ?? engine?.max_context ?? longest;
  if (room !== longest) drawMeter(talk, longest = room);
  const state = names.find(([name]) => name === model())?.[1];
  const known = [model(), state, status.status, engine?.ranks?.length, engine?.max_context].join();
  if (known === limits) return;
  limits = known;
  byId("empty").dataset.facts = engine ? [`${engine.ranks.length} rank${engine.ranks.length === 1 ? "" : "s"}`,
    `${engine.max_context.toLocaleString("en")} tokens of context`].join(" · ") : "";
  if (engine?.state === "ready") settings.showDefaults(fetchJson("/model/info"));
  offerThinking(model());
  drawEmpty();
}

// The choice is for models that can think, as far as that is known: of those in memory.
async function offerThinking(name) {
  const shown = await fetchJson("/api/show", { model: name }).catch(() => null);
  if (shown && name === model()) byId("thinking").parentElement.hidden = !shown.capabilities.includes("thinking");
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
