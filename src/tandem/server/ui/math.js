// Mathematics as MathML, which browsers draw themselves. KaTeX reads it; it is fetched when the first formula comes.
import { element } from "/ui/dom.js";

// What a model writes may load nothing, and be no larger than a page.
const RULES = { output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxExpand: 500, maxSize: 20 };
const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
let fetching = null;

function library() {
  fetching ??= new Promise((done) => {
    const script = element("script", { src: "/ui/katex.js" });
    script.addEventListener("load", () => done(window.katex));
    script.addEventListener("error", () => {
      fetching = null;
      script.remove();
    });
    document.head.append(script);
  });
  return fetching;
}

// Replace `place`, which holds a formula with its marks, with the formula drawn; one that cannot be read stays as it stands.
export function drawMath(place) {
  const source = place.textContent.trim();
  const [open, close, display] = MARKS.find(([mark]) => source.startsWith(mark));
  const made = element("span", { class: "math", title: source }, source);
  place.replaceWith(made);
  const draw = (katex) => {
    try {
      katex.render(source.slice(open.length, -close.length), made, { ...RULES, displayMode: display });
      made.classList.toggle("shown-math", display);
    } catch {
      made.textContent = source;
    }
  };
  if (window.katex) draw(window.katex);
  else library().then(draw);
}
