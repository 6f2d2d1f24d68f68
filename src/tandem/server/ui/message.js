// One message of a conversation on the screen.
import { button, copyButton, element } from "/ui/dom.js";
import { Markdown } from "/ui/markdown.js";

const ENDS = { length: "Cut off at the limit of tokens.", stopped: "Stopped.", content_filter: "Held back by a filter.",
  tool_calls: "It asks for a tool, which this page does not have." };

// The answer of a message that is shown: a message may have several, made by "Regenerate".
export const answerOf = (message) => message.answers[message.chosen];

export const thumbnail = (url, i) => element("img", { src: url, alt: `Picture ${i + 1}` });

export function userMessage(message, actions) {
  const text = element("div", { class: "text", dir: "auto" }, message.content);
  const shown = message.pictures ? element("div", { class: "pictures" }, ...message.pictures.map(thumbnail)) : null;
  const made = element("article", { class: "message user", "aria-label": "You" }, shown, message.content ? text : null);
  const tools = element("div", { class: "tools" }, button("Edit", () => edit(made, message, actions), { symbol: "edit" }),
    copyButton(() => message.content, "Copy"));
  made.append(tools);
  return made;
}

function edit(place, message, actions) {
  const before = [...place.childNodes];
  const area = element("textarea", { "aria-label": "Edit your message", rows: Math.min(8, message.content.split("\n").length + 1) });
  area.value = message.content;
  const back = () => {
    place.classList.remove("editing");
    place.replaceChildren(...before);
  };
  const send = () => (area.value.trim() || message.pictures) && actions.edit(message, area.value.trim());
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      back();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  place.classList.add("editing");
  place.replaceChildren(area, element("div", { class: "buttons" }, button("Cancel", back, { bare: false }),
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
    this.error = element("p", { class: "error", hidden: true });
    this.foot = element("footer", {});
    this.element = element("article", { class: "message assistant", "aria-label": "Answer" }, this.thinking, this.waiting,
      this.text, this.error, this.foot);
    this.thinking.addEventListener("toggle", () => this.drawThought());
  }

  update(over) {
    const answer = answerOf(this.message);
    this.waiting.hidden = over || Boolean(answer.content || answer.reasoning);
    this.thinking.hidden = !answer.reasoning;
    const still = !over && !answer.content;
    this.summary.textContent = still ? "Thinking …" : `Thought for ${seconds((answer.thoughtFor ?? 0) / 1000)}`;
    this.thinking.classList.toggle("still", still);
    this.drawThought();
    this.markdown.draw(answer.content, over);
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
    const end = broken && !answer.error ? "It is not finished." : ENDS[answer.finish];
    const canContinue = (broken || ["length", "stopped"].includes(answer.finish)) && answer.content;
    const limit = answer.finish === "length" && answer.limit ? ` The limit is ${answer.limit} tokens.` : "";
    const several = message.answers.length > 1;
    const turn = (step) => actions.choose(message, message.chosen + step);
    return [
      end ? element("p", { class: "end" }, end + limit) : null,
      element("div", { class: "tools" },
        several ? button("Earlier answer", () => turn(-1), { symbol: "back", disabled: message.chosen === 0 }) : null,
        several ? element("span", { class: "turns" }, `${message.chosen + 1} of ${message.answers.length}`) : null,
        several ? button("Later answer", () => turn(1), { symbol: "next",
          disabled: message.chosen === message.answers.length - 1 }) : null,
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
