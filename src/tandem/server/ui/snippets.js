// Ready pieces of code for this server's address and model.
import { element } from "/ui/dom.js";
import { needsKey } from "/ui/http.js";
import { dress } from "/ui/markdown.js";

const KEY = "YOUR_API_KEY";
// A word of a shell, whatever a model is called.
const quoted = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function pieces(model) {
  const origin = location.origin;
  const key = needsKey() ? KEY : "none";
  const auth = needsKey() ? ` -H 'Authorization: Bearer ${KEY}'` : "";
  const name = JSON.stringify(model);
  return {
    curl: ["bash", `curl ${origin}/v1/chat/completions -H 'Content-Type: application/json'${auth} -d ${quoted(`{
  "model": ${name}, "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 100}`)}`],
    "openai": ["python", `# pip install openai
from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key="${key}")
stream = client.chat.completions.create(
    model=${name}, messages=[{"role": "user", "content": "Name three colours."}], stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)`],
    LangChain: ["python", `# pip install langchain-openai
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url="${origin}/v1", api_key="${key}", model=${name})
for chunk in llm.stream("Name three colours."):
    print(chunk.text, end="", flush=True)`],
    "Open WebUI": ["bash", `# pip install open-webui
OPENAI_API_BASE_URL=${origin}/v1 OPENAI_API_KEY=${key} ENABLE_OLLAMA_API=false open-webui serve`],
    "Claude Code": ["bash", `export ANTHROPIC_BASE_URL=${origin} ANTHROPIC_AUTH_TOKEN=${key}
export ANTHROPIC_MODEL=${quoted(model)} ANTHROPIC_DEFAULT_HAIKU_MODEL=${quoted(model)}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude`],
  };
}

// Tabs with a piece of code each; `prefix` keeps ids apart.
export function snippets(model, prefix) {
  const all = Object.entries(pieces(model));
  const panel = element("div", { role: "tabpanel", id: prefix + "-panel", class: "snippet" });
  const tabs = all.map(([name], i) => element("button", { type: "button", role: "tab", "aria-controls": prefix + "-panel",
    id: `${prefix}-tab-${i}` }, name));
  const show = (chosen) => {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", i === chosen);
      tab.tabIndex = i === chosen ? 0 : -1;
    });
    const [language, text] = all[chosen][1];
    const pre = element("pre", {}, element("code", { class: "language-" + language }, text));
    panel.replaceChildren(pre);
    panel.setAttribute("aria-labelledby", tabs[chosen].id);
    dress(pre);
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => show(i));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.stopPropagation();
      const next = (i + step + tabs.length) % tabs.length;
      show(next);
      tabs[next].focus();
    });
  });
  show(0);
  return element("div", { class: "snippets" }, element("div", { role: "tablist", "aria-label": "Clients" }, ...tabs), panel);
}
