// Answers that are being made: one in each conversation, several at once.
import { answerOf } from "/ui/message.js";
import { settings, wishes } from "/ui/settings.js";
import { emptyAnswer } from "/ui/stream.js";
import { calledTools } from "/ui/toolcalls.js";

export const MOST = 4; // a browser has six connections to a server, and the page asks for more than answers
const SAVE_MS = 2000;
const LOCK = "answer "; // begins the names of locks: of two answers at once in a conversation only one would be kept
const runs = new Map(); // by the conversation's id
const elsewhere = new Set(); // ids of conversations that other tabs answer
let hooks = null; // { drawn(run), began(run), ended(run, how), save(talk) }

export function start(given) {
  hooks = given;
}

export const runIn = (talk) => runs.get(talk.id);
export const everyRun = () => [...runs.values()];
export const stopIn = (talk) => runs.get(talk.id)?.controller.abort();

// Why no answer can begin in `talk`; empty when one can.
export function refusal(talk) {
  if (runs.has(talk.id)) return "The answer is not finished: stop it, or wait for its end.";
  if (elsewhere.has(talk.id)) {
    look(talk.id);
    return "Another tab answers this conversation: stop it there, or wait for its end.";
  }
  if (runs.size < MOST) return "";
  return `${MOST} conversations are being answered: stop one of them, or wait for the end of one.`;
}

// Learn whether another tab answers a conversation. Browsers have locks for pages that come over HTTPS or from this machine.
export async function look(id) {
  const { held } = (await navigator.locks?.query()) ?? { held: [] };
  const other = !runs.has(id) && held.some((one) => one.name === LOCK + id);
  elsewhere[other ? "add" : "delete"](id);
}

// Messages as the API takes them, before `message`.
function sent(talk, message) {
  const before = talk.messages.slice(0, talk.messages.indexOf(message));
  const silent = (other) => other?.role === "assistant" && !answerOf(other).content && !answerOf(other).reasoning
    && !answerOf(other).calls?.length;
  const system = (talk.system ?? "").trim() || settings.value("system").trim();
  // A question that had no answer is left out with it: many chat templates want turns.
  return [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap((other, i) => {
    if (silent(other) || silent(before[i + 1])) return [];
    return other.role === "user" ? [{ role: "user", content: asked(other) }] : calledTools(answerOf(other));
  })];
}

// A question with the texts of its files, and its pictures.
export function asked(message) {
  const pictures = (message.files ?? []).filter((file) => file.url);
  const files = (message.files ?? []).filter((file) => !file.url).map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([marks]) => marks.length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  const text = [...files, message.content].join("\n\n");
  return pictures.length ? [{ type: "text", text }, ...pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }))] : text;
}

export const nextAnswer = (model) => ({ role: "assistant", chosen: 0, answers: [emptyAnswer(model)] });

// Make the chosen answer of `message` by `how`, a function of stream.js.
export async function run(talk, message, how, model) {
  const answer = answerOf(message);
  const wished = wishes();
  answer.limit = wished.max_tokens;
  delete answer.error;
  const one = { talk, message, controller: new AbortController(), saved: Date.now(), frame: 0 };
  const messages = sent(talk, message);
  runs.set(talk.id, one);
  const over = new Promise((done) => { one.over = done; });
  navigator.locks?.request(LOCK + talk.id, () => over);
  hooks.began(one);
  hooks.save(talk);
  const changed = () => {
    // At most once a frame, however many tokens came.
    one.frame ||= requestAnimationFrame(() => {
      one.frame = 0;
      if (runs.get(talk.id) === one) hooks.drawn(one);
    });
    if (Date.now() - one.saved > SAVE_MS) {
      one.saved = Date.now();
      hooks.save(talk);
    }
  };
  try {
    await how(answer.model = model, messages, wished, answer, one.controller.signal, changed);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message;
  }
  cancelAnimationFrame(one.frame);
  runs.delete(talk.id);
  one.over();
  hooks.ended(one, how);
  hooks.save(talk);
}
