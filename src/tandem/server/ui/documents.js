// Text of PDFs. pdf.js reads it in a worker of the browser; both are fetched when the first PDF is attached.
const MOST_BYTES = 50_000_000;
const MOST_TEXT = 1_000_000; // characters
// Nothing is drawn, and nothing is fetched for it.
const RULES = { disableFontFace: true, useSystemFonts: false, useWasm: false, useWorkerFetch: false, isOffscreenCanvasSupported: false,
  enableXfa: false, verbosity: 0 };
const WHY = {
  PasswordException: "is locked with a password: save a copy without one.",
  InvalidPDFException: "is damaged, or is no PDF: open it in another program and save it anew.",
};

// The text of a PDF; throws an Error whose message goes on from the file's name.
export async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`is larger than ${MOST_BYTES / 1e6} MB: attach a part of it.`);
  const library = await import("/ui/pdf.js").catch(() => null);
  if (!library) throw new Error("cannot be read, since the server does not give the page its reader of PDFs: try again.");
  library.GlobalWorkerOptions.workerSrc = "/ui/pdf.worker.js";
  const task = library.getDocument({ data: await file.arrayBuffer(), ...RULES });
  try {
    return await pages(await task.promise);
  } catch (error) {
    throw error.ours ? error : new Error(WHY[error.name] ?? `cannot be read (${error.message}): save it as text first.`);
  } finally {
    task.destroy();
  }
}

async function pages(pdf) {
  let text = "";
  for (let number = 1; number <= pdf.numPages; number++) {
    const { items } = await (await pdf.getPage(number)).getTextContent();
    const page = items.map((one) => (one.str ?? "") + (one.hasEOL ? "\n" : "")).join("").replaceAll("\0", "").trim();
    if (page) text += (text ? "\n\n" : "") + page;
    if (text.length > MOST_TEXT) throw ours(`has more than ${MOST_TEXT / 1e6} million characters: attach a part of it.`);
  }
  if (!text) throw ours("has no text, as scans have none: attach its pages as pictures, or have a program recognise its text first.");
  return text;
}

const ours = (message) => Object.assign(new Error(message), { ours: true });
