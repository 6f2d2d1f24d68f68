// Requests to the server that served the page, with the API key once one is known; it stays in this tab.
const dialog = document.getElementById("login");
let asking = null;

function askForKey(reason) {
  asking ??= new Promise((done) => {
    document.getElementById("login-reason").textContent = reason;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("key", document.getElementById("key").value.trim());
      asking = null;
      done();
    }, { once: true });
  });
  return asking;
}

// The response of a request; throws an Error with the server's own message when it is not a success.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    const message = body.error?.message ?? "status " + response.status;
    if (response.status !== 401) throw new Error(message);
    await askForKey(message);
  }
}

// An element with attributes and children; text goes in as text, never as markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
