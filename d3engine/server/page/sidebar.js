// The list of conversations: search, pin, rename, delete.

import { iconButton, made } from "./icons.js";

export class Sidebar {
  #conversations = [];
  #current = null;

  /** `act(name, conversation, value)` is called for "open", "pin", "rename" and "remove". */
  constructor(act) {
    this.act = act;
    this.list = document.getElementById("conversations");
    this.search = document.getElementById("search");
    this.search.addEventListener("input", () => this.#draw());
  }

  draw(conversations, current) {
    this.#conversations = conversations;
    this.#current = current;
    this.#draw();
  }

  #draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.#conversations.filter((one) => !wanted || textOf(one).includes(wanted));
    const isPinned = ({ pinned }) => Number(pinned ?? false);
    found.sort((one, other) => isPinned(other) - isPinned(one) || other.updated - one.updated);
    this.list.replaceChildren(...found.map((one) => this.#item(one)));
    const none = document.getElementById("none-found");
    none.hidden = found.length > 0;
    none.textContent = wanted ? "No conversation matches." : "No conversations yet.";
  }

  #item(conversation) {
    const open = made("button", "open", conversation.title || "New chat");
    open.type = "button";
    open.title = open.textContent;
    open.addEventListener("click", () => this.act("open", conversation));
    if (conversation.id === this.#current?.id) open.setAttribute("aria-current", "true");
    const item = made("li", "", open);
    item.dataset.id = conversation.id;
    const pin = iconButton("pin", `Pin ${open.textContent}`, () => {
      this.act("pin", conversation);
      this.list.querySelector(`[data-id="${CSS.escape(conversation.id)}"] [aria-pressed]`)?.focus(); // the list is new
    });
    pin.setAttribute("aria-pressed", String(Boolean(conversation.pinned)));
    const rename = iconButton("edit", `Rename ${open.textContent}`, () => this.#rename(item, conversation));
    const remove = iconButton("remove", `Delete ${open.textContent}`, () => {
      if (confirm(`Delete the conversation “${open.textContent}”?`)) this.act("remove", conversation);
    });
    item.append(pin, rename, remove);
    return item;
  }

  #rename(item, conversation) {
    const input = made("input");
    input.value = conversation.title;
    input.setAttribute("aria-label", "Title");
    let isOver = false;
    const end = (isMeant) => {
      if (isOver) return;
      isOver = true;
      const title = input.value.trim();
      if (isMeant && title) this.act("rename", conversation, title);
      else this.#draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
    input.focus();
  }
}

const textOf = ({ title, messages }) => [title, ...messages.map(({ content }) => content)].join("\n").toLowerCase();
