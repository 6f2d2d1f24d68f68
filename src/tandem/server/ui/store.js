// Conversations and settings, kept in this browser (IndexedDB). Where it keeps nothing they live as long as the page.
const NAME = "tandem";
let database = null;

const done = (asked) => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

// True if this browser keeps what it is given.
export async function open() {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("talks", { keyPath: "id" });
      asked.result.createObjectStore("settings");
    };
    database = await done(asked);
    return true;
  } catch {
    return false;
  }
}

const place = (name, mode) => database.transaction(name, mode).objectStore(name);

// All conversations, the latest first.
export async function talks() {
  if (!database) return [];
  return (await done(place("talks").getAll())).sort((a, b) => b.changed - a.changed);
}

export async function keepTalk(talk) {
  if (!database) return;
  const asked = place("talks", "readwrite").put(structuredClone(talk));
  asked.transaction.commit?.(); // at once: the page may go
  await done(asked);
}

export async function dropTalk(id) {
  if (database) await done(place("talks", "readwrite").delete(id));
}

export async function dropAll() {
  if (database) await done(place("talks", "readwrite").clear());
}

export async function setting(name) {
  return database ? done(place("settings").get(name)) : undefined;
}

export async function keepSetting(name, value) {
  if (database) await done(place("settings", "readwrite").put(value, name));
}
