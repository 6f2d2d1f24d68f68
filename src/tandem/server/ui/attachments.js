// Files beside a question: texts, those of PDFs too, are sent with it, in front of its words, and pictures as they are.
import { textOf } from "/ui/documents.js";
import { button, byId, element } from "/ui/dom.js";

const MOST_BYTES = 1_000_000;
let files = [];
let changed = null;
let reading = 0; // PDFs that are being read

export function start(onChange) {
  changed = onChange;
  byId("attach").addEventListener("click", () => byId("attach-file").click());
  byId("attach-file").addEventListener("change", () => {
    take([...byId("attach-file").files]);
    byId("attach-file").value = "";
  });
  byId("question").addEventListener("paste", (event) => given(event, event.clipboardData));
  byId("talk").addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  byId("talk").addEventListener("drop", (event) => given(event, event.dataTransfer));
}

export const some = () => files.length > 0;

// True while a PDF is read, which the next question waits for.
export const busy = () => reading > 0;

// Files that were pasted or dropped; the browser would leave the page for a dropped one.
function given(event, data) {
  if (!data.files.length) return;
  event.preventDefault();
  take([...data.files]);
}

// Add files, as from a dialog; those that cannot be read say why.
export async function take(given) {
  const wrong = [];
  for (const file of given) {
    if (file.type.startsWith("image/")) {
      files.push({ name: file.name, url: await dataUri(file) });
      continue;
    }
    if (/\.pdf$/i.test(file.name) || file.type === "application/pdf") {
      const refused = await readPdf(file);
      if (refused) wrong.push(`${file.name} ${refused}`);
      continue;
    }
    const refused = file.size > MOST_BYTES ? `is larger than ${MOST_BYTES / 1e6} MB` : null;
    const text = refused ? "" : await file.text();
    if (refused) wrong.push(`${file.name} ${refused}.`);
    else if (text.includes("\0") || text.includes("\ufffd")) wrong.push(`${file.name} is no text in UTF-8.`);
    else files.push({ name: file.name, text });
  }
  byId("attach-told").textContent = wrong.join(" ");
  draw();
}

// Add the text of a PDF; return why not, if it cannot be read.
async function readPdf(file) {
  reading++;
  draw();
  try {
    files.push({ name: file.name, text: await textOf(file) });
    return "";
  } catch (error) {
    return error.message;
  } finally {
    reading--;
  }
}

function dataUri(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file);
  });
}

// What is attached, which is taken off; `back` puts some on again.
export function taken() {
  const given = files;
  back([]);
  return given;
}

export function back(given) {
  files = given;
  byId("attach-told").textContent = "";
  draw();
}

function draw() {
  byId("attached").replaceChildren(...files.map((file) => chip(file, () => {
    files = files.filter((one) => one !== file);
    draw();
  })), ...(reading ? [element("span", { class: "file", role: "status" }, "Reading a PDF …")] : []));
  changed();
}

// A picture, or a file's name and size; with `drop` it can be taken off.
export function chip(file, drop) {
  const remove = drop ? button(`Remove ${file.name}`, drop, { symbol: "delete" }) : null;
  if (file.url) return element("span", { class: "file" }, element("img", { src: file.url, alt: file.name }), remove);
  const size = file.text.length < 2000 ? `${file.text.length} characters` : `${Math.round(file.text.length / 1000)} thousand characters`;
  return element("span", { class: "file", title: size }, file.name, element("small", {}, size), remove);
}
