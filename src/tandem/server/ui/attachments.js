// Files beside a question: texts, those of PDFs too, are sent with it, in front of its words, and pictures as they are.
import { textOf } from "/ui/documents.js";
import { button, byId, element } from "/ui/dom.js";

const MOST_BYTES = 1_000_000;
const UNREAD = /^image\/(svg|bmp|x-ms-bmp|tiff|hei[cf])/; // pictures that servers refuse
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
  byId("talk").addEventListener("drop", (event) => given(event, event.dataTransfer));
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, keepPage);
}

export const some = () => files.length > 0;

// True while a PDF is read, which the next question waits for.
export const busy = () => reading > 0;

// The browser would leave the page for a dropped file, also beside the conversation, where none is taken.
function keepPage(event) {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  if (!byId("talk").contains(event.target)) event.dataTransfer.dropEffect = "none";
}

// Files that were pasted or dropped.
function given(event, data) {
  if (!data.files.length) return;
  event.preventDefault();
  take([...data.files]);
}

// Add files, as from a dialog; those that cannot be read say why.
export async function take(given) {
  const wrong = [];
  for (const file of given) {
    try {
      files.push({ name: file.name, ...(await content(file)) });
    } catch (error) {
      wrong.push(`${file.name} ${error instanceof DOMException ? "cannot be read: is it a folder, or gone?" : error.message}`);
    }
  }
  byId("attach-told").textContent = wrong.join(" ");
  draw();
}

// What is sent of a file: its text, or the address of a picture. Throws an Error whose message goes on from the file's name.
async function content(file) {
  if (UNREAD.test(file.type)) {
    const kind = file.type.startsWith("image/svg") ? "an SVG" : `of an unknown kind (${file.type})`;
    throw new Error(`is ${kind}; send PNG, JPEG, WebP, GIF or AVIF.`); // the server's words
  }
  if (file.type.startsWith("image/")) return { url: await dataUri(file) };
  if (/\.pdf$/i.test(file.name) || file.type === "application/pdf") return { text: await readPdf(file) };
  if (file.size > MOST_BYTES) throw new Error(`is larger than ${MOST_BYTES / 1e6} MB.`);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error("is no text in UTF-8.");
  return { text };
}

async function readPdf(file) {
  reading++;
  draw();
  try {
    return await textOf(file);
  } finally {
    reading--;
  }
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
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
