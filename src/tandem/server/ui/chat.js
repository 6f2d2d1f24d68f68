// A conversation with the model: streamed, shown as markdown.
import { element, request } from "/ui/http.js";

const byId = (id) => document.getElementById(id);
const history = [];
let running = null;

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    history.length = 0;
    byId("messages").replaceChildren();
  });
}

// The models that there are, in a list where there are several.
export function offer(models) {
  const list = byId("chat-model");
  const names = models.map((one) => one.id);
  list.parentElement.hidden = names.length < 2;
  if ([...list.options].map((one) => one.value).join("\n") !== names.join("\n")) {
    list.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  const asked = { role: "user", content: question };
  history.push(asked);
  byId("messages").append(element("div", { class: "message user" }, question));
  const place = element("div", { class: "message assistant" });
  byId("messages").append(place);
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  const answer = { role: "assistant", content: "" };
  try {
    await stream(answer, place);
  } catch (error) {
    if (error.name !== "AbortError") place.append(element("p", { class: "error" }, error.message));
  } finally {
    if (history.at(-1) === asked) {
      if (answer.content) history.push(answer);
      else history.pop();
    }
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    place.dataset.done = "yes";
  }
}

function body() {
  const system = byId("system").value.trim();
  const seed = byId("seed").value;
  return {
    model: byId("chat-model").value || "default",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: Number(byId("temperature").value),
    top_p: Number(byId("top_p").value),
    max_tokens: Number(byId("max_tokens").value),
    ...(seed ? { seed: Number(seed) } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function stream(answer, place) {
  const started = performance.now();
  const response = await request("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body()),
    signal: running.signal });
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    answer.content += event.choices?.[0]?.delta?.content ?? "";
    usage = event.usage ?? usage;
    render(place, answer.content);
  }
  if (usage) {
    const seconds = (performance.now() - started) / 1000;
    place.append(element("small", {}, `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`));
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

function render(place, text) {
  const atEnd = window.innerHeight + window.scrollY >= document.body.offsetHeight - 40;
  // An element with an id or a name of ours would stand in for it.
  place.innerHTML = DOMPurify.sanitize(marked.parse(text), { FORBID_ATTR: ["id", "name"], FORBID_TAGS: ["form"] });
  if (atEnd) window.scrollTo(0, document.body.scrollHeight);
}
