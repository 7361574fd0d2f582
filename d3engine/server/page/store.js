// Where conversations and their folders are kept: this browser's IndexedDB, and nowhere else. Where a browser allows none, in memory.

const changes = new BroadcastChannel("d3engine-conversations");

const KINDS = ["conversations", "folders"]; // each came with the database's next version

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Store {
  #database = null;

  /** `changed(kind, id)` is called when another tab has changed one of "conversations" or "folders". */
  constructor(changed) {
    changes.onmessage = ({ data: { kind, id } }) => changed(kind, id);
  }

  /** All {conversations, folders}; null where the browser keeps none. `blocked` is called while a tab with an older page
   * holds them. */
  async open(blocked) {
    try {
      const request = indexedDB.open("d3engine", KINDS.length);
      request.onblocked = blocked;
      request.onupgradeneeded = ({ oldVersion }) => {
        for (const kind of KINDS.slice(oldVersion)) request.result.createObjectStore(kind, { keyPath: "id" });
      };
      const database = await promised(request);
      database.onversionchange = () => database.close(); // for a newer page
      this.#database = database;
      const [conversations, folders] = await Promise.all(KINDS.map((kind) => promised(this.#objects(kind, "readonly").getAll())));
      return { conversations, folders };
    } catch {
      return null;
    }
  }

  async get(kind, id) {
    return this.#database && promised(this.#objects(kind, "readonly").get(id));
  }

  async save(kind, one) {
    if (!this.#database) return;
    await promised(this.#objects(kind, "readwrite").put(one));
    changes.postMessage({ kind, id: one.id });
  }

  async remove(kind, id) {
    if (!this.#database) return;
    await promised(this.#objects(kind, "readwrite").delete(id));
    changes.postMessage({ kind, id });
  }

  #objects(kind, mode) {
    return this.#database.transaction(kind, mode).objectStore(kind);
  }
}

const keptBy = (storage) => ({
  get(name, otherwise) {
    try {
      return JSON.parse(storage().getItem(`d3engine-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      storage().setItem(`d3engine-${name}`, JSON.stringify(value));
    } catch {
      // Without storage, or with too little, it holds for as long as the page is open.
    }
  },
});

/** What is kept of the page itself, as JSON. */
export const kept = keptBy(() => localStorage);

/** What is kept for as long as the tab lives. */
export const keptInTab = keptBy(() => sessionStorage);
