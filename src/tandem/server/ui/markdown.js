// Markdown of a model as elements. What it writes does nothing: raw HTML is shown as text, images are not fetched, links
// lead to web pages alone and open beside this one, and what is left goes through DOMPurify with a short list.
import { copyButton, element } from "/ui/dom.js";
import { drawMath } from "/ui/math.js";

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);
const MOST_COLOURED = 20_000;
// Characters of a formula, and how far ahead the next is looked for: marks that nothing closes would freeze the page.
const MOST_FORMULA = 2000;
const NEAR = 1000;
const parser = new marked.Marked({ gfm: true, breaks: true, renderer: {
  html: ({ text }) => escaped(text),
  image: ({ href, text }) => `<em>[image${text ? ": " + escaped(text) : ""}]</em> ${escaped(href)}`,
  code: ({ text, lang }) => {
    const language = /^[\w+#-]{1,30}/.exec(lang ?? "")?.[0];
    return `<pre><code${language ? ` class="language-${language}"` : ""}>${escaped(text)}\n</code></pre>`;
  },
} });

// Mathematics between $..$, $$..$$, \(..\) and \[..\] is taken out first: Markdown would take backslashes, stars and
// underscores out of it. It goes through DOMPurify as code, and math.js draws it. A $ that is an amount of money has a blank
// behind it or a digit after its end.
const lines = String.raw`(?:(?!\n[ \t]*\n)[\s\S]){1,${MOST_FORMULA}}?`;
const shown = String.raw`\$\$${lines}\$\$|\\\[${lines}\\\]`;
const inline = String.raw`\\\(${lines}\\\)|\$(?![\s$])(?:\\.|[^$\`\\\n])*?(?:\\.|[^\s$\`\\])\$(?!\d)`;
const math = (name, level, pattern, start, wrap) => ({ name, level,
  start: (text) => {
    const at = text.slice(0, NEAR).search(start);
    return at >= 0 ? at : level === "inline" && text.length > NEAR ? NEAR : undefined; // cut text becomes one again
  },
  tokenizer: (text) => { const found = pattern.exec(text); return found ? { type: name, raw: found[0], text: found[0].trim() } : undefined; },
  renderer: ({ text }) => wrap(`<code class="language-math">${escaped(text)}</code>`) });
parser.use({ extensions: [
  math("shownMath", "block", new RegExp(`^ {0,3}(?:${shown})[ \\t]*(?:\\n+|$)`), /^ {0,3}(?:\$\$|\\\[)/m, (text) => `<p>${text}</p>`),
  math("math", "inline", new RegExp(`^(?:${shown}|${inline})`), /\$|\\[([]/, (text) => text),
] });
const purifier = DOMPurify(window);
const colours = DOMPurify(window);
const RULES = {
  ALLOWED_TAGS: ["p", "br", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4",
    "h5", "h6", "hr", "table", "thead", "tbody", "tr", "th", "td", "a", "input"],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked", "disabled"], // are no addresses
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true,
};
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.hasAttribute?.("class") && !(node.tagName === "CODE" && /^language-[\w+#-]+$/.test(node.className))) {
    node.removeAttribute("class");
  }
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "INPUT") { // of a task list
    if (node.type !== "checkbox") node.remove();
    node.setAttribute("disabled", "");
  }
});

// A text as it stands: what it means is nested deeper than the parser can go, as when a model repeats itself.
const plain = (text) => [{ type: "text", raw: text, text }];

function lexed(text) {
  try {
    return parser.lexer(text);
  } catch {
    return plain(text);
  }
}

function parsed(token) {
  try {
    return parser.parser([token]);
  } catch {
    return parser.parser(plain(token.raw));
  }
}

// Draws a text that grows into `place`: only blocks that have changed are made again.
export class Markdown {
  constructor(place) {
    this.place = place;
    this.drawn = [];
  }

  draw(text, over) {
    const tokens = lexed(text);
    const links = JSON.stringify(tokens.links); // may stand below what they are for
    const blocks = tokens.filter((token) => token.type !== "space");
    blocks.forEach((token, i) => {
      const last = i === blocks.length - 1;
      const coloured = over || !last;
      const key = token.raw + (coloured ? "1" : "0") + links;
      if (this.drawn[i] === key) return;
      this.drawn[i] = key;
      const block = element("div", { class: "block", dir: "auto" });
      block.append(purifier.sanitize(parsed(token), RULES));
      block.querySelectorAll(":not(pre) > code.language-math").forEach(drawMath);
      block.querySelectorAll("pre").forEach((pre) => dress(pre, coloured));
      block.querySelectorAll("table").forEach((table) => {
        const around = element("div", { class: "scroll" });
        table.replaceWith(around);
        around.append(table);
      });
      const old = this.place.children[i];
      if (old) old.replaceWith(block);
      else this.place.append(block);
    });
    while (this.place.children.length > blocks.length) this.place.lastChild.remove();
    this.drawn.length = blocks.length;
  }
}

// A code block gets its language's name, colours, and a button that copies it.
export function dress(pre, coloured = true) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const text = code.textContent.replace(/\n$/, "");
  if (coloured && hljs.getLanguage(language) && text.length < MOST_COLOURED) {
    const made = hljs.highlight(text, { language, ignoreIllegals: true }).value;
    code.replaceChildren(colours.sanitize(made, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"],
      RETURN_DOM_FRAGMENT: true }));
  }
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"),
    copyButton(() => text, "Copy code", { text: true }));
  const around = element("div", { class: "code", dir: "ltr" });
  pre.replaceWith(around);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", `${language || "text"} code`);
  pre.setAttribute("role", "region");
  around.append(head, pre);
}
