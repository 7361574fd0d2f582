// Where conversations are kept: this browser's IndexedDB, and nowhere else. Where a browser allows none, in memory.

const changes = new BroadcastChannel("d3engine-conversations");

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Store {
  #database = null;

  /** `changed` is called when another tab has changed a conversation. */
  constructor(changed) {
    changes.onmessage = ({ data }) => changed(data);
  }

  /** All conversations; null where the browser keeps none. */
  async open() {
    try {
      const request = indexedDB.open("d3engine", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
      this.#database = await promised(request);
      return await promised(this.#conversations("readonly").getAll());
    } catch {
      return null;
    }
  }

  async get(id) {
    return this.#database && promised(this.#conversations("readonly").get(id));
  }

  async save(conversation) {
    if (!this.#database) return;
    await promised(this.#conversations("readwrite").put(conversation));
    changes.postMessage(conversation.id);
  }

  async remove(id) {
    if (!this.#database) return;
    await promised(this.#conversations("readwrite").delete(id));
    changes.postMessage(id);
  }

  #conversations(mode) {
    return this.#database.transaction("conversations", mode).objectStore("conversations");
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
