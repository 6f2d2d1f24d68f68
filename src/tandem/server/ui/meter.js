// How much of the model's context a conversation takes, by the tokens of its last answer.
import { byId } from "/ui/dom.js";
import { answerOf } from "/ui/message.js";

const FULL = 0.9;

export function drawMeter(talk, longest) {
  const last = talk.messages.findLast((one) => one.role === "assistant" && answerOf(one).used);
  const used = last ? answerOf(last).used : 0;
  byId("context-meter").hidden = !used || !longest;
  if (!used || !longest) return;
  const [gauge, text] = byId("context-meter").children;
  const full = used > FULL * longest;
  gauge.max = longest;
  gauge.value = used;
  gauge.high = FULL * longest;
  text.textContent = `${used.toLocaleString("en")} of ${longest.toLocaleString("en")} tokens${full ? ": start a new chat soon" : ""}`;
  byId("context-meter").classList.toggle("full", full);
}
