// A conversation: a tree of messages, of which one path from a first question to `current` is shown.

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** A new conversation; `messages` are {id, parent, role, content, ...}, in the order in which they were made. Until a
 * person or the model has `named` it, its first question is its title. */
export function newConversation(system = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, system, created: now, updated: now, current: null, messages: [] };
}

export const newFolder = (name) => ({ id: newId(), name, collapsed: false });

/** Add a message behind `parent` (an id, or null for a first one) and show the path to it. */
export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, created: Date.now(), ...fields };
  conversation.messages.push(message);
  conversation.current = message.id;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message);
  return message;
}

function titleOf({ content, files = [] }) {
  const line = content.trim().split("\n")[0] || files[0]?.name || "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** Take in what another tab has made of a conversation in which `written` is being written here. */
export function takeIn(conversation, other, written) {
  const { messages, current } = conversation;
  const known = new Map(messages.map((message) => [message.id, message]));
  for (const message of other.messages) {
    if (!known.has(message.id)) messages.push(message);
    else if (message.id !== written.id) Object.assign(known.get(message.id), message);
  }
  Object.assign(conversation, other, { messages });
  show(conversation, known.get(current));
}

/** The messages shown, from the first to the current one. */
export function path(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let message = byId.get(conversation.current); message; message = byId.get(message.parent)) found.unshift(message);
  return found;
}

/** The branches of a turn: all messages behind the same parent. */
export const siblings = (conversation, { parent }) => conversation.messages.filter((other) => other.parent === parent);

/** Show the path through a message, to the newest message behind it. */
export function show(conversation, message) {
  let last = message;
  for (let next = last; next; next = conversation.messages.findLast(({ parent }) => parent === last.id)) last = next;
  conversation.current = last.id;
}

/** Delete a message and all behind it; its neighbour, or its parent, is shown instead. */
export function removeMessage(conversation, message) {
  const gone = new Set([message.id]);
  for (const { id, parent } of conversation.messages) if (gone.has(parent)) gone.add(id);
  conversation.messages = conversation.messages.filter(({ id }) => !gone.has(id));
  const other = siblings(conversation, message).at(-1);
  if (other) show(conversation, other);
  else conversation.current = message.parent;
}

/** What a message says to the model: attached files first, then its text. */
export function contentOf({ content, files = [] }) {
  return [...files.map(({ name, text }) => `File \`${name}\`:\n${fenced(text)}`), content].filter(Boolean).join("\n\n");
}

function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The `messages` of a request for what follows the last of `shown`. */
export function requestMessages(conversation, shown) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const said = shown.filter((message) => message.role === "user" || message.content);
  return [...system, ...said.map((message) => ({ role: message.role, content: contentOf(message) }))];
}

/** The path shown as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system.trim()) parts.push("## System prompt", conversation.system.trim());
  for (const message of path(conversation)) {
    parts.push(message.role === "user" ? "## Question" : "## Answer");
    if (message.reasoning) parts.push(message.reasoning.trim().replace(/^/gm, "> "));
    parts.push(contentOf(message).trim());
    for (const { name, arguments: given } of message.calls ?? []) parts.push(`Call of \`${name}\`:\n${fenced(given)}`);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

/** An exported file of these conversations and folders. */
export function toJson(conversations, folders) {
  return JSON.stringify({ format: "d3engine conversations", version: 1, folders, conversations }, null, 1);
}

/** The conversations of an exported file, and the folders that are new. A conversation that has the id of one of `known`
 * is that one if only its folder differs, and otherwise becomes a copy; a folder that has the id or the name of one of
 * `knownFolders` is that one. */
export function fromJson(text, known, knownFolders) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== "d3engine conversations" || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new Error("The file holds no conversations that this page has exported.");
  }
  const { folders: given = [] } = file;
  if (!areAll(given, isFolder)) throw new Error("A folder of the file is damaged; nothing was imported.");
  const folders = []; // that are new
  const places = new Map(); // id of a folder in the file -> its id here
  for (const folder of given) {
    const all = [...knownFolders, ...folders];
    const same = all.find(({ id }) => id === folder.id) ?? all.find(({ name }) => name === folder.name);
    if (!same) folders.push(folder);
    places.set(folder.id, (same ?? folder).id);
  }
  const conversations = file.conversations.map((one, number) => {
    if (!isConversation(one)) throw new Error(`Conversation ${number + 1} of the file is damaged; none was imported.`);
    const placed = one.folder ? { ...one, folder: places.get(one.folder) ?? null } : one;
    const same = known.find(({ id }) => id === placed.id);
    if (!same) return placed;
    return contentsOf(same) === contentsOf(placed) ? same : { ...placed, id: newId(), title: `${placed.title} (imported)` };
  });
  return { conversations, folders };
}

const contentsOf = ({ folder, ...others }) => JSON.stringify(others);
const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const areAll = (values, check) => Array.isArray(values) && values.every(check);

// What a message may have beyond {id, parent, role, content}.
const OPTIONAL = {
  created: isNumber,
  model: isText,
  reasoning: isText,
  end: isText,
  problem: isText,
  files: (files) => areAll(files, (file) => isText(file?.name) && isText(file?.text)),
  calls: (calls) => areAll(calls, (call) => isText(call?.name) && isText(call?.arguments)),
  depths: (depths) => areAll(depths, (pair) => areAll(pair, isNumber) && pair.length === 2),
  figures: (figures) => Object.values(figures).every((value) => value === null || isNumber(value)),
  layers: ({ of, mean }) => isNumber(of) && (mean === null || isNumber(mean)),
};

const isFolder = (given) => isText(given?.id) && isText(given.name) && typeof given.collapsed === "boolean";

function isConversation(given) {
  const { id, title, system, created, updated, messages, current, folder = null } = given ?? {};
  if (![id, title, system].every(isText) || ![created, updated].every(isNumber) || !Array.isArray(messages)) return false;
  if (folder !== null && !isText(folder)) return false;
  const seen = new Set([null]); // parents come first, so that no path is a circle
  for (const message of messages) {
    const { id: own, parent, role, content, ...others } = message ?? {};
    if (![own, content].every(isText) || seen.has(own) || !seen.has(parent)) return false;
    if (!["user", "assistant"].includes(role)) return false;
    const isKnown = ([name, value]) => value === null || OPTIONAL[name]?.(value);
    if (!Object.entries(others).every(isKnown)) return false;
    seen.add(own);
  }
  return current === null ? !messages.length : seen.has(current);
}
