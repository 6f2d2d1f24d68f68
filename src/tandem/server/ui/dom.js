// Making elements. Text goes in as text, never as markup.
export const byId = (id) => document.getElementById(id);

// An element with attributes and children; those that are null or undefined are left out.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const made = document.createElementNS(space, "svg");
  made.setAttribute("class", "icon");
  made.setAttribute("aria-hidden", "true");
  made.append(document.createElementNS(space, "use"));
  made.firstChild.setAttribute("href", "#i-" + name);
  return made;
}

// A button; without visible text its label is for screen readers, and shown as a hint.
export function button(label, act, { symbol, bare = true, text = !symbol, ...attributes } = {}) {
  const made = element("button", { type: "button", class: bare ? "bare" : null, ...(text ? {} : { "aria-label": label,
    title: label }), ...attributes }, symbol ? icon(symbol) : null, text ? label : null);
  made.addEventListener("click", act);
  return made;
}

export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine there is no clipboard.
  const area = element("textarea", { class: "offscreen", readonly: true });
  const before = document.activeElement;
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  before?.focus();
}

// A button that copies what `text` gives, and says so for a moment.
export function copyButton(text, label = "Copy", options = {}) {
  const made = button(label, async () => {
    await copy(text());
    made.firstChild.replaceWith(icon("done"));
    made.dataset.copied = "yes";
    setTimeout(() => {
      made.firstChild.replaceWith(icon("copy"));
      delete made.dataset.copied;
    }, 1500);
  }, { symbol: "copy", ...options });
  return made;
}

// A length is a style, which only code may set here (the page's security policy forbids it in markup).
export function sized(made, styles) {
  for (const [name, value] of Object.entries(styles)) made.style.setProperty(name, value);
  return made;
}

// Replace the children only if what they are made of has changed: what is under a pointer or has the focus stays. A control
// that is made anew keeps the focus, by its label.
export function redraw(place, facts, make) {
  const key = JSON.stringify(facts);
  if (place.dataset.drawn === key) return;
  place.dataset.drawn = key;
  const label = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  place.replaceChildren(...make());
  if (label) [...place.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === label)?.focus();
}

export const gib = (bytes) => {
  if (bytes && bytes < 2 ** 20) return Math.ceil(bytes / 2 ** 10) + " KiB";
  if (bytes < 2 ** 30) return (bytes / 2 ** 20).toFixed(0) + " MiB";
  return (bytes / 2 ** 30).toFixed(bytes < 100 * 2 ** 30 ? 1 : 0) + " GiB";
};
