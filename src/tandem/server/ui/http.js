// Requests to the server that served the page, with the API key once one is known; it stays in this tab.
export const SOON_MS = 10_000; // what is asked for every second comes within that, or the server does not answer
const dialog = document.getElementById("login");
const field = document.getElementById("key");
// The key of the page that `tandem agent --page` serves comes with its address, and stays in this tab.
let pageKey = new URLSearchParams(location.hash.slice(1)).get("key");
let asking = null;
let key = null;
try {
  key = sessionStorage.getItem("key");
  if (pageKey) sessionStorage.setItem("page-key", pageKey);
  else pageKey = sessionStorage.getItem("page-key");
} catch {
  // This browser keeps nothing.
}

function askForKey(reason) {
  asking ??= new Promise((done) => {
    document.getElementById("login-reason").textContent = reason;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      key = field.validity.valid ? field.value.trim() : "";
      try {
        sessionStorage.setItem("key", key);
      } catch {
        // It lives as long as the page.
      }
      asking = null;
      done();
    }, { once: true });
  });
  return asking;
}

// True once the server has asked for a key.
export const needsKey = () => key !== null;

// True where the page can find machines and start a model.
export const ofAgent = () => Boolean(pageKey);

// The response of a request; throws an Error with the server's own message when it is not a success. `within` are
// milliseconds for the server to answer.
export async function request(path, { within, ...options } = {}) {
  for (;;) {
    const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}),
      ...(pageKey ? { "X-Page-Key": pageKey } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, ...(within ? { signal: AbortSignal.timeout(within) } : {}), headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Does it run, and is this machine in its network?");
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    const message = body?.error?.message ?? "status " + response.status;
    if (response.status !== 401) throw Object.assign(new Error(message), { code: body?.error?.code });
    await askForKey(message);
  }
}

// What a GET answers, or a POST of `body`, as an object.
export async function ask(path, body, options = {}) {
  const sent = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body) };
  return (await request(path, { ...sent, ...options })).json();
}
