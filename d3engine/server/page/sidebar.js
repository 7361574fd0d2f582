// The list of conversations and their folders: search, pin, move, rename, delete.

import { newFolder } from "./conversation.js";
import { button, icon, iconButton, made } from "./icons.js";

const DRAGGED = "application/x-d3engine-conversation";
const $ = (id) => document.getElementById(id);

export class Sidebar {
  #conversations = [];
  #folders = [];
  #current = null;
  #droppedOn = undefined; // the id of the folder, null for none, that a dragged conversation was dropped on

  /** `act(name, conversation, fields)` is called for "open", "change" and "remove", `actOnFolder(name, folder, fields)`
   * for "change", of a new one too, and "remove". Either has the list drawn again. */
  constructor(act, actOnFolder) {
    this.act = act;
    this.actOnFolder = actOnFolder;
    this.list = $("conversations");
    this.search = $("search");
    this.search.addEventListener("input", () => this.#draw());
    $("new-folder").addEventListener("click", () => this.#addFolder());
    this.#takeDropped();
  }

  draw(conversations, current, folders) {
    this.#conversations = conversations;
    this.#folders = [...folders].sort((one, other) => one.name.localeCompare(other.name));
    this.#current = current;
    this.#draw();
  }

  #draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const names = new Map(this.#folders.map(({ id, name }) => [id, name]));
    const found = this.#conversations.filter((one) => !wanted || textOf(one, names.get(one.folder)).includes(wanted));
    const isPinned = ({ pinned }) => Number(pinned ?? false);
    found.sort((one, other) => isPinned(other) - isPinned(one) || other.updated - one.updated);
    const folders = this.#folders.map((folder) => ({ folder, inside: found.filter((one) => one.folder === folder.id) }));
    this.list.replaceChildren(
      ...folders.filter(({ inside }) => inside.length || !wanted).map((one) => this.#folder(one, Boolean(wanted))),
      ...found.filter((one) => !names.has(one.folder)).map((one) => this.#item(one)),
    );
    $("none-found").hidden = found.length > 0;
    $("none-found").textContent = wanted ? "No conversation matches." : "No conversations yet.";
  }

  #item(conversation) {
    const open = button("open", () => this.act("open", conversation), conversation.title || "New chat");
    open.title = open.textContent;
    if (conversation.id === this.#current?.id) open.setAttribute("aria-current", "true");
    const item = made("li", "item", open);
    item.dataset.id = conversation.id;
    item.draggable = true;
    item.addEventListener("dragstart", ({ dataTransfer }) => {
      this.#droppedOn = undefined;
      dataTransfer.setData(DRAGGED, "");
    });
    // Not before: a browser that loses what is dragged while it is dropped drags on.
    item.addEventListener("dragend", () => {
      if (this.#droppedOn !== undefined) this.act("change", conversation, { folder: this.#droppedOn });
    });
    const pin = iconButton("pin", `Pin ${open.textContent}`, () => {
      this.act("change", conversation, { pinned: !conversation.pinned });
      this.#focus(conversation, "[aria-pressed]");
    });
    pin.setAttribute("aria-pressed", String(Boolean(conversation.pinned)));
    const move = iconButton("folder", `Move ${open.textContent} to a folder`, () => this.#askWhere(conversation));
    move.classList.add("move");
    const rename = iconButton("edit", `Rename ${open.textContent}`, () =>
      this.#rename(item, conversation, "Title", conversation.title, (title) => this.act("change", conversation, { title, named: true })),
    );
    const remove = iconButton("remove", `Delete ${open.textContent}`, () => {
      if (confirm(`Delete the conversation “${open.textContent}”?`)) this.act("remove", conversation);
    });
    item.append(pin, move, rename, remove);
    return item;
  }

  /** A folder with the conversations inside that are shown; a search opens it. */
  #folder({ folder, inside }, isSearched) {
    const isOpen = isSearched || !folder.collapsed;
    const count = made("span", "hint", String(inside.length));
    const turn = () => {
      this.actOnFolder("change", folder, { collapsed: !folder.collapsed });
      this.#focus(folder, ".toggle");
    };
    const toggle = button("toggle", turn, icon(isOpen ? "folderOpen" : "folder"), made("span", "", folder.name), count);
    Object.assign(toggle, { title: folder.name, disabled: isSearched });
    toggle.setAttribute("aria-label", `${folder.name}, ${inside.length} conversation${inside.length === 1 ? "" : "s"}`);
    toggle.setAttribute("aria-expanded", String(isOpen));
    const rename = iconButton("edit", `Rename the folder ${folder.name}`, () => this.#renameFolder(folder));
    const remove = iconButton("remove", `Delete the folder ${folder.name}`, () => {
      if (confirm(`Delete the folder “${folder.name}”? Its conversations stay in the list.`)) this.actOnFolder("remove", folder);
    });
    const items = made("ul", "", ...(isOpen ? inside.map((one) => this.#item(one)) : []));
    const element = made("li", "folder", made("div", "item", toggle, rename, remove), items);
    element.dataset.id = folder.id;
    return element;
  }

  #addFolder(fill = () => {}) {
    const folder = newFolder("New folder");
    this.search.value = ""; // which would hide it
    this.actOnFolder("change", folder, {});
    fill(folder);
    this.#renameFolder(folder);
  }

  #renameFolder(folder) {
    const row = this.#element(folder).firstChild;
    this.#rename(row, folder, "Name of the folder", folder.name, (name) => this.actOnFolder("change", folder, { name }));
  }

  /** Let a folder be chosen for a conversation, by pointer or keys. */
  #askWhere(conversation) {
    const move = (folder) => {
      $("move").close();
      this.act("change", conversation, { folder: folder.id });
      if (!this.#focus(conversation, ".move")) this.#focus(folder, ".toggle");
    };
    const choice = (name, words, press) => button("quiet", press, icon(name), words);
    const known = [{ id: null, name: "No folder" }, ...this.#folders];
    const isIn = known.find(({ id }) => id === conversation.folder) ?? known[0];
    const choices = known.map((folder) => {
      const offered = choice(folder === isIn ? "done" : "folder", folder.name, () => move(folder));
      if (folder === isIn) offered.setAttribute("aria-current", "true");
      return offered;
    });
    const added = choice("folderPlus", "New folder", () => this.#addFolder(move));
    $("move-to").replaceChildren(...[...choices, added].map((one) => made("li", "", one)));
    $("move").showModal();
  }

  /** Conversations can be dragged into a folder, and out of it to the rest of the list. */
  #takeDropped() {
    const mark = (target) => {
      for (const other of [this.list, ...this.list.querySelectorAll(".folder")]) other.classList.toggle("over", other === target);
    };
    const targetOf = ({ target }) => target.closest?.(".folder") ?? this.list;
    this.list.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes(DRAGGED)) return;
      event.preventDefault();
      mark(targetOf(event));
    });
    this.list.addEventListener("dragleave", (event) => this.list.contains(event.relatedTarget) || mark(null));
    this.list.addEventListener("drop", (event) => {
      mark(null);
      if (!event.dataTransfer.types.includes(DRAGGED)) return;
      event.preventDefault();
      this.#droppedOn = targetOf(event).dataset.id ?? null;
    });
  }

  #element({ id }) {
    return this.list.querySelector(`[data-id="${CSS.escape(id)}"]`);
  }

  /** Give a part of an entry the focus again, since the list is new; whether it is shown. */
  #focus(entry, part) {
    const found = this.#element(entry)?.querySelector(part);
    found?.focus();
    return Boolean(found);
  }

  #rename(place, entry, label, before, take) {
    const input = made("input");
    input.value = before;
    input.setAttribute("aria-label", label);
    let isOver = false;
    const end = (isMeant) => {
      if (isOver) return;
      isOver = true;
      const name = input.value.trim();
      if (isMeant && name) take(name);
      else this.#draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      event.preventDefault(); // the key would press the button that gets the focus
      end(event.key === "Enter");
      this.#focus(entry, ".open, .toggle");
    });
    input.addEventListener("blur", () => end(true));
    place.draggable = false; // a text in it is selected by dragging
    place.replaceChildren(input);
    input.select();
    input.focus();
  }
}

const textOf = ({ title, messages }, folder = "") => [folder, title, ...messages.map(({ content }) => content)].join("\n").toLowerCase();
