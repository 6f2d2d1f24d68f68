// Conversations and settings, kept in this browser (IndexedDB). Where it keeps nothing they live as long as the page.
const NAME = "tandem";
let database = null;
let tabs = null; // others of this server

const done = (asked) => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

// True if this browser keeps what it is given. `elsewhere` is called when another tab keeps or drops a conversation,
// with its id, or with null when all are dropped.
export async function open(elsewhere) {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("talks", { keyPath: "id" });
      asked.result.createObjectStore("settings");
    };
    database = await done(asked);
    database.onversionchange = () => database.close(); // a newer page, in another tab
    tabs = new BroadcastChannel(NAME);
    tabs.onmessage = (event) => elsewhere(event.data);
    return true;
  } catch {
    return false;
  }
}

async function read(name, ask) {
  try {
    return await done(ask(database.transaction(name).objectStore(name)));
  } catch {
    return undefined;
  }
}

// True once it is kept; false where there is no room, or no place at all.
async function write(name, act) {
  try {
    const transaction = database.transaction(name, "readwrite");
    act(transaction.objectStore(name));
    transaction.commit?.(); // at once: the page may go
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    return true;
  } catch {
    return false;
  }
}

const text = (value) => typeof value === "string";
const number = (value) => typeof value === "number";
const maybe = (good, ...values) => values.every((value) => value === undefined || value === null || good(value));
const list = (value, good) => maybe(Array.isArray, value) && (value ?? []).every(good);
const index = (value, of) => Number.isInteger(value) && value in of;
const question = (one) => text(one.content) && list(one.files, (file) => text(file?.name) && (text(file.text) || file.url?.startsWith?.("data:image/")));
const reply = (one) => text(one?.content) && list(one.calls, (call) => text(call?.name) && text(call.arguments)
  && text(call.result)) && maybe(text, one.reasoning, one.finish, one.error, one.model, one.request)
  && maybe(number, one.tokens, one.first, one.rate, one.used, one.thoughtFor, one.limit, one.seconds);
const message = (one) => (one?.role === "user" ? question(one) && list(one.versions, (version) => question(version)
  && Array.isArray(version.rest) && version.rest.every(message)) && (!one.versions || index(one.version, one.versions))
  : Array.isArray(one?.answers) && one.answers.every(reply) && index(one.chosen, one.answers));

// Whether a conversation can be shown, whatever wrote it.
export const whole = (talk) => text(talk?.id) && maybe(text, talk.title, talk.system) && maybe(number, talk.changed)
  && Array.isArray(talk.messages) && talk.messages.every(message);

// All conversations, the latest first, but for those that another version of the page left and this one cannot show.
export async function talks() {
  return ((await read("talks", (place) => place.getAll())) ?? []).filter(whole).sort((a, b) => b.changed - a.changed);
}

export const talk = (id) => read("talks", (place) => place.get(id));

export async function keepTalk(one) {
  const kept = await write("talks", (place) => place.put(one));
  tabs?.postMessage(one.id);
  return kept;
}

export async function dropTalk(id) {
  await write("talks", (place) => place.delete(id));
  tabs?.postMessage(id);
}

export async function dropAll() {
  await write("talks", (place) => place.clear());
  tabs?.postMessage(null);
}

export const setting = (name) => read("settings", (place) => place.get(name));

export const keepSetting = (name, value) => write("settings", (place) => place.put(value, name));
