// One message of a conversation on the screen.
import { chip } from "/ui/attachments.js";
import { button, copyButton, element } from "/ui/dom.js";
import { Markdown } from "/ui/markdown.js";
import { drawCalls } from "/ui/toolcalls.js";

const ENDS = { length: "Cut off at the limit of tokens.", stopped: "Stopped.", content_filter: "Held back by a filter.",
  tool_calls: "It waits for the results of its calls." };

// The answer of a message that is shown: a message may have several, made by "Regenerate".
export const answerOf = (message) => message.answers[message.chosen];

export function userMessage(message, actions) {
  const files = (message.files ?? []).map((file) => chip(file));
  const text = element("div", { class: "text", dir: "auto" }, message.content);
  const made = element("article", { class: "message user", "aria-label": "You" },
    files.length ? element("div", { class: "files" }, ...files) : null, message.content ? text : null);
  made.append(element("div", { class: "tools" },
    ...turns("version", message.version ?? 0, message.versions?.length ?? 1, (step) => actions.turn(message, step)),
    button("Edit", () => edit(made, message, actions), { symbol: "edit" }), copyButton(() => message.content, "Copy")));
  return made;
}

// Buttons that lead through several versions of a message.
function turns(what, at, count, turn) {
  return count < 2 ? [] : [
    button(`Earlier ${what}`, () => turn(-1), { symbol: "back", disabled: at === 0 }),
    element("span", { class: "turns" }, `${at + 1} of ${count}`),
    button(`Later ${what}`, () => turn(1), { symbol: "next", disabled: at === count - 1 })];
}

function edit(place, message, actions) {
  const before = [...place.childNodes];
  const area = element("textarea", { "aria-label": "Edit your message", rows: Math.min(8, message.content.split("\n").length + 1) });
  area.value = message.content;
  const back = () => {
    place.classList.remove("editing");
    place.replaceChildren(...before);
  };
  const send = () => (area.value.trim() || message.files?.length) && actions.edit(message, area.value.trim());
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  place.classList.add("editing");
  place.replaceChildren(area, element("div", { class: "buttons" }, button("Cancel", back, { bare: false, class: "cancel" }),
    button("Send again", send, { bare: false, class: "primary" })));
  area.focus();
}

// An answer that may still grow: `update` draws what there is.
export class AssistantMessage {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thought = element("div", { class: "text", dir: "auto" });
    this.summary = element("summary", {}, "");
    this.thinking = element("details", { class: "thinking", hidden: true }, this.summary, this.thought);
    this.text = element("div", { class: "markdown" });
    this.markdown = new Markdown(this.text);
    this.waiting = element("p", { class: "pending" }, element("span", { class: "hidden" }, "Waiting for the first token"));
    this.calls = element("div", { class: "calls" });
    this.error = element("p", { class: "error", hidden: true });
    this.foot = element("footer", {});
    this.element = element("article", { class: "message assistant", "aria-label": "Answer" }, this.thinking, this.waiting,
      this.text, this.calls, this.error, this.foot);
    this.thinking.addEventListener("toggle", () => this.drawThought());
  }

  update(over) {
    const answer = answerOf(this.message);
    this.waiting.hidden = over || Boolean(answer.content || answer.reasoning || answer.calls);
    this.thinking.hidden = !answer.reasoning;
    const still = !over && !answer.content && !answer.calls;
    this.summary.textContent = still ? "Thinking …" : `Thought for ${seconds((answer.thoughtFor ?? 0) / 1000)}`;
    this.thinking.classList.toggle("still", still);
    this.drawThought();
    this.markdown.draw(answer.content, over);
    drawCalls(this.calls, answer.calls, over && this.actions.last(this.message) ? () => this.actions.results(this.message) : null);
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    if (over) {
      this.element.dataset.done = "yes";
      this.foot.replaceChildren(...this.footer(answer));
    } else {
      delete this.element.dataset.done;
      this.foot.replaceChildren(element("small", {}, answer.tokens ? `${answer.tokens} tokens${rate(answer)}` : ""));
    }
  }

  drawThought() {
    // What is folded needs no drawing.
    const { reasoning } = answerOf(this.message);
    if (this.thinking.open && this.thought.textContent !== reasoning) this.thought.textContent = reasoning;
  }

  footer(answer) {
    const { message, actions } = this;
    const facts = answer.tokens ? [`${answer.tokens} tokens${rate(answer)}`,
      ...(answer.first ? [`first token after ${seconds(answer.first / 1000)}`] : [])].join(" · ") : "";
    const broken = answer.finish === null;
    const over = answer.finish === "tool_calls" && !actions.last(message); // the results were sent
    const end = broken && !answer.error ? "It is not finished." : over ? null : ENDS[answer.finish];
    const canContinue = (broken || ["length", "stopped"].includes(answer.finish)) && answer.content;
    const limit = answer.finish === "length" && answer.limit ? ` The limit is ${answer.limit} tokens.` : "";
    return [
      end ? element("p", { class: "end" }, end + limit) : null,
      element("div", { class: "tools" },
        ...turns("answer", message.chosen, message.answers.length, (step) => actions.choose(message, step)),
        copyButton(() => answer.content, "Copy"),
        actions.last(message) ? button("Regenerate", () => actions.regenerate(message), { symbol: "again" }) : null,
        canContinue && actions.last(message) ? button("Continue", () => actions.resume(message), { symbol: "more", text: true })
          : null,
        element("small", { title: answer.model ? `${answer.model}${answer.request ? ", request " + answer.request : ""}` : null },
          facts)),
    ].filter(Boolean);
  }
}

const seconds = (value) => (value < 1 ? value.toFixed(2) : value.toFixed(1)) + " s";
const rate = (answer) => (answer.rate ? ` · ${answer.rate.toFixed(1)} tokens/s` : "");
