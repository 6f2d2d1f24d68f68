// One answer of the model as it comes: text, reasoning, why it ended, how many tokens, how fast.
import { ask, request } from "/ui/http.js";
import { gather } from "/ui/toolcalls.js";

const SHORT_MS = 20; // from here on a rate says something
const BROKEN = "The answer broke off: the connection has ended.";

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(BROKEN);
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

// Fill `answer` from a streamed request, and call `changed` at every piece. Throws what goes wrong, an AbortError too.
async function follow(path, body, answer, signal, changed) {
  const started = performance.now();
  let first = null;
  let last = started;
  let pieces = 0;
  const before = answer.tokens ?? 0;
  const response = await request(path, { method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }), signal });
  answer.request = response.headers.get("x-request-id") ?? answer.request;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (thought || text) {
      last = performance.now();
      if (first === null) answer.first = (first = last) - started;
      pieces += 1;
      if (thought) answer.thoughtFor = last - first;
    }
    gather(answer, choice?.delta?.tool_calls);
    answer.reasoning += thought;
    answer.content += text;
    answer.finish = choice?.finish_reason ?? answer.finish;
    const fresh = event.usage?.completion_tokens ?? pieces;
    answer.tokens = before + fresh;
    if (event.usage) answer.used = event.usage.prompt_tokens + event.usage.completion_tokens; // of the context
    answer.seconds = (last - started) / 1000;
    answer.rate = first !== null && last - first > SHORT_MS && fresh > 1 ? (1000 * (fresh - 1)) / (last - first) : null;
    changed();
  }
  if (answer.finish === null) throw new Error(BROKEN);
}

export const emptyAnswer = (model) => ({ content: "", reasoning: "", finish: null, tokens: 0, first: null, rate: null, model });

export function chat(model, messages, wishes, answer, signal, changed) {
  return follow("/v1/chat/completions", { model, messages, ...wishes }, answer, signal, changed);
}

// Go on with an answer where it ended: the template writes it as a past answer, and the model goes on behind its text.
export async function resume(model, messages, wishes, answer, signal, changed) {
  const post = (path, body) => ask(path, { model, ...body }, { signal });
  const whole = await post("/tokenize", { messages: [...messages, { role: "assistant", content: answer.content }],
    add_generation_prompt: false });
  const { prompt } = await post("/detokenize", { tokens: whole.tokens });
  const text = answer.content.trim();
  const at = prompt.lastIndexOf(text);
  if (!text || at < 0) throw new Error("This model's chat template does not show its answers as they are: ask it to go on.");
  const upTo = prompt.slice(0, at) + answer.content.trimStart();
  const { tokens } = await post("/tokenize", { prompt: upTo, add_special_tokens: false });
  answer.finish = null;
  const { tools, enable_thinking, reasoning_effort, ...sampling } = wishes; // the others are for chats alone
  await follow("/v1/completions", { model, prompt: tokens, ...sampling }, answer, signal, changed);
}
