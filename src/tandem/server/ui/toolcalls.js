// Calls of tools: the model asks for them, a person runs them and writes down what they gave.
import { button, copyButton, element } from "/ui/dom.js";

// Gather a piece of a streamed answer.
export function gather(answer, pieces) {
  for (const piece of pieces ?? []) {
    answer.calls ??= [];
    const call = answer.calls[piece.index ?? 0] ??= { id: "", name: "", arguments: "", result: "" };
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

// A past answer and the results of its calls, as messages of the API.
export function calledTools(answer) {
  const { calls, content } = answer;
  if (!calls?.length) return [{ role: "assistant", content }];
  return [{ role: "assistant", content, tool_calls: calls.map((call) => ({ id: call.id, type: "function",
    function: { name: call.name, arguments: call.arguments } })) },
  ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result || "There is no result." }))];
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still grows, or the model wrote no JSON
  }
}

// Draw the calls of an answer into `place`; `send`, once they can be answered, sends their results on.
export function drawCalls(place, calls, send) {
  const areas = [];
  const boxes = (calls ?? []).map((call) => {
    const name = element("div", { class: "code-head" }, element("span", {}, "calls ", element("b", {}, call.name || "…")),
      copyButton(() => call.arguments, "Copy arguments"));
    const box = element("div", { class: "code call", dir: "ltr" }, name, element("pre", { tabindex: 0,
      "aria-label": `Arguments of ${call.name}` }, pretty(call.arguments)));
    if (send) {
      const area = element("textarea", { rows: 2, placeholder: "What did it give?", "aria-label": `Result of ${call.name}` });
      area.value = call.result;
      area.addEventListener("input", () => { call.result = area.value; });
      areas.push(area);
      box.append(area);
    } else if (call.result) {
      box.append(element("pre", { tabindex: 0, "aria-label": `Result of ${call.name}` }, call.result));
    }
    return box;
  });
  const act = send ? [element("div", { class: "buttons" }, button("Send results", send, { bare: false, class: "primary" }))] : [];
  place.replaceChildren(...boxes, ...(boxes.length ? act : []));
}
