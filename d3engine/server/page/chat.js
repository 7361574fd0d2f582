// The chat as a whole: which conversation is shown, what runs, and what the page's controls do.

import { getJson, takeKeys, tell, tellRefusal } from "./api.js";
import { download, readText } from "./clipboard.js";
import { DepthScale } from "./colours.js";
import * as tree from "./conversation.js";
import { hideDetails, showDetails } from "./details.js";
import { Follower } from "./follow.js";
import { generate } from "./generate.js";
import { drawIcons, icon, iconButton, made } from "./icons.js";
import { isReady } from "./markdown.js";
import { MessageView } from "./message.js";
import { words } from "./schedule.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { kept, keptInTab, Store } from "./store.js";
import { drawLegend } from "./strip.js";
import { theme } from "./theme.js";
import { titleOf, watchComparisons } from "./titles.js";
import { canUnderline, Underlines } from "./underline.js";

const SAVE_EVERY_MS = 2000;
const LONGEST_PASTE = 2000; // characters that stay text; longer ones become a file

const $ = (id) => document.getElementById(id);
const store = new Store(changedElsewhere);
const sidebar = new Sidebar(actOnConversation, actOnFolder);
const settings = new Settings($("fields"));
const scale = new DepthScale();
const underlines = new Underlines();
const follower = new Follower($("messages"), (isAtEnd) => ($("to-end").hidden = isAtEnd));
const runs = new Map(); // id of a conversation -> {message, controller, isDrawn, progress}
let models = [];
let conversations = [];
let folders = [];
let conversation = tree.newConversation(kept.get("system", ""));
let views = [];
const viewsOfMessages = new WeakMap(); // message -> its view
let files = keptInTab.get("draft", {}).files ?? [];
let titling = null; // what ends the request for a title
let isComparing = false;
let isUnderlined = canUnderline && kept.get("underline", false);

const run = () => runs.get(conversation.id);
const model = () => models.find(({ id }) => id === $("model").value);

// -- the server -------------------------------------------------------------------------------------------------------

async function connect() {
  tell(null);
  try {
    await loadModels();
    $("key-form").hidden = true;
  } catch (error) {
    tellRefusal(error);
    return;
  }
  drawControls();
  await settings.learn();
  drawModel();
  const { chat_template: template } = await getJson("tokenizer_info").catch(() => ({}));
  if (template === null) note("This model has no chat template. Under “Compare depths” it can complete a text.");
}

async function loadModels() {
  models = (await getJson("v1/models")).data;
  const chosen = $("model").value || kept.get("model", "");
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  document.body.classList.toggle("one-model", models.length < 2);
  if (models.some(({ id }) => id === chosen)) $("model").value = chosen;
  drawModel();
}

/** What is known of the model before it answers. */
function drawModel() {
  const extra = model()?.d3ext;
  $("model").title = $("model").value;
  $("depth").textContent = extra ? words(extra.depth) : "loaded with the first question";
  $("depth").classList.toggle("error", extra?.certified === false);
  if (extra?.certified === false) $("depth").textContent += ", never certified for this model";
  $("depth").title = $("depth").textContent;
  settings.showDefaults(!models.length || [model()?.id, model()?.parent].includes(models[0].id));
  drawDepths();
}

// -- a question and its answer ----------------------------------------------------------------------------------------

function send() {
  const content = $("prompt").value.trim();
  const sampling = run() || $("send").disabled || !(content || files.length) ? null : chosenSampling();
  if (sampling === null) return;
  $("prompt").value = "";
  ask(conversation.current, { content, files: files.splice(0).map(({ name, text }) => ({ name, text })) }, sampling);
}

/** The fields of sampling; null where they cannot be sent, which is said. */
function chosenSampling() {
  tell(null);
  try {
    return settings.values();
  } catch (error) {
    tell(error.message);
    return null;
  }
}

function ask(parent, { content, files: attached }, sampling) {
  if (!conversations.includes(conversation)) conversations.push(conversation);
  const fields = { role: "user", content };
  if (attached?.length) fields.files = attached;
  answer(tree.addMessage(conversation, parent, fields), sampling);
}

/** Have the model answer a question; or go on with an answer that is there. */
async function answer(question, sampling, given = null) {
  titling?.abort(); // nothing of the page's own runs beside an answer
  const asked = conversation;
  const message = given ?? tree.addMessage(asked, question.id, { role: "assistant", content: "", model: $("model").value });
  const messages = tree.requestMessages(asked, tree.path(asked).filter(({ id }) => given || id !== message.id));
  const body = { ...sampling, model: $("model").value, messages, ...(given ? { continue_final_message: true } : {}) };
  const controller = new AbortController();
  const running = { message, controller, isDrawn: true };
  runs.set(asked.id, running);
  message.end = null;
  asked.updated = Date.now();
  draw();
  follower.begin();
  say("Generating.");
  let saved = performance.now();
  save(asked);
  await generate(message, body, controller.signal, (progress) => {
    running.progress = progress;
    drawRun(asked, running);
    if (performance.now() - saved < SAVE_EVERY_MS) return;
    saved = performance.now();
    save(asked);
  });
  runs.delete(asked.id);
  save(asked);
  if (asked === conversation) draw();
  else drawList();
  say(message.problem ?? `Answer: ${message.content}`);
  if (message.problem || !model()?.d3ext) loadModels().catch(() => {}); // a restarted server may have others
  if (message.content && !message.problem) giveTitle(asked, message);
}

/** Have the model that has answered name a conversation, unless it has a name, or there is something else to do. */
async function giveTitle(asked, { model: by }) {
  if (asked.named !== false || isComparing || runs.size || !$("titles").checked) return;
  const controller = (titling = new AbortController());
  let title = null;
  try {
    title = await titleOf(asked, tree.path(asked), by, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") return; // the next answer asks again
  }
  if (asked.named || !conversations.includes(asked)) return;
  Object.assign(asked, { title: title ?? asked.title, named: true });
  save(asked);
  if (asked === conversation) document.title = `${asked.title} – d3engine`;
  drawList();
}

/** Write what has come at the next frame, if its conversation is shown. */
function drawRun(asked, running) {
  if (!running.isDrawn) return;
  running.isDrawn = false;
  requestAnimationFrame(() => {
    running.isDrawn = true;
    if (asked !== conversation) return;
    const view = views.find(({ message }) => message === running.message);
    if (!view || runs.get(asked.id) !== running) return;
    view.write(true, running.progress);
    underline(view);
    drawContext();
  });
}

/** Do what a button of a message asks for; whether that can be done now. */
function act(name, message, value) {
  tell(run() ? "An answer is being written: wait for its end, or stop it." : null);
  if (run()) return false;
  if (name === "show") tree.show(conversation, message);
  else if (name === "remove") tree.removeMessage(conversation, message);
  else if (name === "rewrite") rewrite(message, value);
  else return actOnModel(name, message, value);
  save(conversation);
  draw();
  return true;
}

/** An answer with another text, as one more branch, from which the model can go on. */
function rewrite({ parent, model: by, reasoning }, content) {
  const fields = { role: "assistant", content, model: by, reasoning: reasoning ?? null, end: "edited" };
  tree.addMessage(conversation, parent, fields);
}

function actOnModel(name, message, value) {
  const sampling = chosenSampling();
  if (sampling === null) return false;
  if (name === "regenerate") answer({ id: message.parent }, sampling);
  else if (name === "continue") answer(null, sampling, message);
  else if (name === "edit") ask(message.parent, { content: value.trim(), files: message.files }, sampling);
  return true;
}

// -- conversations ----------------------------------------------------------------------------------------------------

function open(other) {
  conversation = other;
  $("system").value = conversation.system;
  document.body.classList.remove("listing");
  tell(null);
  draw();
  window.scrollTo(0, document.documentElement.scrollHeight);
  if (matchMedia("(hover: hover)").matches) $("prompt").focus(); // elsewhere a keyboard would rise
}

function begin() {
  open(tree.newConversation(kept.get("system", "")));
}

async function actOnConversation(name, one, fields) {
  if (name === "open") return open(one);
  if (name === "change") {
    Object.assign(one, fields);
    save(one);
    return drawList();
  }
  runs.get(one.id)?.controller.abort();
  conversations = conversations.filter((other) => other !== one);
  await store.remove("conversations", one.id);
  return one === conversation ? begin() : drawList();
}

/** Change a folder, which may be new, or delete it: its conversations stay. */
function actOnFolder(name, folder, fields) {
  folders = folders.filter(({ id }) => id !== folder.id);
  if (name === "change") {
    folders.push(Object.assign(folder, fields));
    persist("folders", folder);
  } else {
    for (const one of conversations.filter((other) => other.folder === folder.id)) {
      one.folder = null;
      save(one);
    }
    store.remove("folders", folder.id);
  }
  drawList();
}

function save(one) {
  if (conversations.includes(one)) persist("conversations", one);
}

function persist(kind, one) {
  store.save(kind, one).catch((error) => tell(`The browser cannot keep these ${kind}: ${error.message}`));
}

/** Another tab has changed a conversation or a folder, or deleted it. */
async function changedElsewhere(kind, id) {
  const other = await store.get(kind, id);
  const running = runs.get(id);
  if (running) {
    const own = conversations.find((one) => one.id === id);
    if (own && other) tree.takeIn(own, other, running.message); // what is saved next here must hold it
    return own === conversation ? draw() : drawList();
  }
  if (kind === "folders") {
    folders = [...folders.filter((one) => one.id !== id), ...(other ? [other] : [])];
    drawList();
    return;
  }
  conversations = conversations.filter((one) => one.id !== id);
  if (other) conversations.push(other);
  if (conversation.id !== id) return drawList();
  if (!other) return begin();
  conversation = other;
  return draw();
}

async function importFile(file) {
  try {
    const { conversations: added, folders: newFolders } = tree.fromJson(await file.text(), conversations, folders);
    for (const folder of newFolders) {
      folders.push(folder);
      await store.save("folders", folder);
    }
    for (const one of added) {
      conversations = [...conversations.filter(({ id }) => id !== one.id), one];
      await store.save("conversations", one);
    }
    say(`${added.length} imported.`);
    open(added[0] ?? conversation);
  } catch (error) {
    document.body.classList.remove("listing"); // which may cover what is said
    tell(error.message);
  }
}

/** The name of an exported file. */
const fileName = () => conversation.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
const exportMarkdown = () => download(`${fileName()}.md`, tree.toMarkdown(conversation), "text/markdown");
const exportJson = () => {
  const own = folders.filter(({ id }) => id === conversation.folder);
  download(`${fileName()}.json`, tree.toJson([conversation], own), "application/json");
};
const exportAll = () => download("conversations.json", tree.toJson(conversations, folders), "application/json");

// -- how it looks -----------------------------------------------------------------------------------------------------

function draw() {
  hideDetails();
  underlines.eraseAll();
  const before = views;
  views = tree.path(conversation).map(viewOf);
  for (const [number, view] of views.entries()) {
    const { message } = view;
    if (message.role === "assistant") view.write(message === run()?.message, run()?.progress);
    const branches = tree.siblings(conversation, message);
    view.offer({ isBusy: Boolean(run()), branches, isLast: number === views.length - 1 });
  }
  const same = views.findIndex((view, number) => view !== before[number]);
  for (const { element } of before.slice(same < 0 ? views.length : same)) element.remove();
  $("messages").append(...(same < 0 ? [] : views.slice(same).map(({ element }) => element)));
  $("welcome").hidden = views.length > 0;
  document.title = conversation.title ? `${conversation.title} – d3engine` : "d3engine";
  drawControls();
  drawList();
  drawDepths();
}

function viewOf(message) {
  if (!viewsOfMessages.has(message)) viewsOfMessages.set(message, new MessageView(message, act));
  return viewsOfMessages.get(message);
}

function drawControls() {
  $("send").hidden = Boolean(run());
  $("stop").hidden = !run();
  $("send").disabled = !models.length || !($("prompt").value.trim() || files.length);
  $("model").disabled = Boolean(run());
  $("export").hidden = !conversation.messages.length;
  drawFiles();
  drawContext();
  fit();
}

const drawList = () => sidebar.draw(conversations, conversation, folders);

/** How much of the model's length the conversation has, by its last answer. */
function drawContext() {
  const used = views.findLast(({ message }) => message.figures)?.message.figures.context;
  const most = model()?.max_model_len;
  $("context").textContent = used && most ? `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens of context` : "";
  $("context").classList.toggle("error", used >= 0.9 * most);
}

function drawFiles() {
  const chips = files.map((file) => {
    const leave = () => {
      files = files.filter((other) => other !== file);
      drawControls();
    };
    const remove = iconButton("close", `Remove ${file.name}`, leave);
    if (!file.isPasted) return made("li", "", icon("file"), file.name, remove);
    const expand = iconButton("expand", `Put ${file.name} into the message`, () => {
      $("prompt").setRangeText(file.text, $("prompt").selectionStart, $("prompt").selectionEnd, "end");
      leave();
      $("prompt").focus();
    });
    const size = made("span", "hint", `${file.text.length.toLocaleString("en")} characters`);
    return made("li", "", icon("file"), file.name, size, expand, remove);
  });
  $("files").replaceChildren(...chips);
  $("files").hidden = !chips.length;
}

/** The message field is as high as its text. */
function fit() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function drawDepths() {
  const extra = model()?.d3ext;
  $("underline").setAttribute("aria-pressed", String(isUnderlined));
  $("legend").hidden = !isUnderlined || !extra;
  if (!isUnderlined) return underlines.eraseAll();
  const found = views.flatMap(({ message }) => message.depths ?? []).map(([, depth]) => depth);
  const layers = Math.max(extra?.num_layers ?? 1, ...found);
  scale.set(layers, Math.min(layers, ...found));
  drawLegend($("legend"), scale);
  return views.forEach(underline);
}

function underline({ message, answer: element }) {
  if (!isUnderlined || !element || !message.depths?.length) return;
  const least = message.depths.reduce((found, [, depth]) => Math.min(found, depth), scale.least);
  if (least < scale.least) return drawDepths();
  underlines.draw(element, message.content, message.depths);
}

/** What a screen reader says. */
function say(text) {
  $("status").textContent = text;
}

/** Something that has to be known once; returns the line. */
function note(text) {
  const line = made("p", "hint", text, iconButton("close", "Dismiss", () => line.remove()));
  $("notes").append(line);
  return line;
}

// -- controls ---------------------------------------------------------------------------------------------------------

async function attach(chosen, isPasted = false) {
  const isAtEnd = $("to-end").hidden;
  const problems = [];
  for (const file of chosen) {
    try {
      files.push({ ...(await readText(file)), isPasted });
    } catch (error) {
      problems.push(error.message);
    }
  }
  tell(problems.join(" ") || null);
  drawControls();
  if (isAtEnd) window.scrollTo(0, document.documentElement.scrollHeight); // the field has grown over it
  $("prompt").focus();
}

function takeFiles(event, given) {
  if (!given.length) return;
  event.preventDefault();
  attach([...given]);
}

/** A long text that is pasted becomes a file, which can be put into the message after all. */
function paste(event) {
  const text = event.clipboardData.getData("text/plain");
  if (event.clipboardData.files.length || text.length <= LONGEST_PASTE) return takeFiles(event, event.clipboardData.files);
  event.preventDefault();
  const names = new Set(files.map(({ name }) => name));
  let number = 1;
  while (names.has(`pasted-${number}.txt`)) number += 1;
  return attach([new File([text], `pasted-${number}.txt`)], true);
}

function choose(input, take) {
  input.addEventListener("change", async () => {
    await take([...input.files]);
    input.value = "";
  });
}

function showSidebar() {
  document.body.classList.add("listing");
  $("search").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("input", drawControls);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("prompt").value && !run()) {
    const last = views.findLast(({ message }) => message.role === "user");
    if (last) event.preventDefault();
    last?.edit();
  }
});
$("stop").addEventListener("click", () => run()?.controller.abort());
$("new").addEventListener("click", begin);
$("open-sidebar").addEventListener("click", showSidebar);
$("close-sidebar").addEventListener("click", () => document.body.classList.remove("listing"));
$("chat").addEventListener("click", (event) => {
  if (!$("open-sidebar").contains(event.target)) document.body.classList.remove("listing");
});
$("attach").addEventListener("click", () => $("choose-files").click());
$("import").addEventListener("click", () => $("choose-import").click());
choose($("choose-files"), attach);
choose($("choose-import"), ([file]) => importFile(file));
$("export-markdown").addEventListener("click", exportMarkdown);
$("export-json").addEventListener("click", exportJson);
$("export").addEventListener("focusout", ({ relatedTarget }) => $("export").contains(relatedTarget) || ($("export").open = false));
$("to-end").addEventListener("click", () => follower.begin());
$("export-all").addEventListener("click", exportAll);
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("show-help").addEventListener("click", () => $("help").showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
}
$("reset").addEventListener("click", () => settings.reset());
$("remove-all").addEventListener("click", async () => {
  if (!confirm(`Delete all ${conversations.length} conversations and ${folders.length} folders?`)) return;
  for (const { id } of folders.splice(0)) await store.remove("folders", id);
  for (const { id } of conversations.splice(0)) {
    runs.get(id)?.controller.abort();
    await store.remove("conversations", id);
  }
  $("settings").close();
  begin();
});
$("system").addEventListener("input", () => (conversation.system = $("system").value));
$("settings").addEventListener("close", () => save(conversation));
$("keep-system").addEventListener("click", () => {
  kept.set("system", $("system").value);
  say("Kept for new conversations.");
});
$("model").addEventListener("change", () => {
  kept.set("model", $("model").value);
  drawModel();
  drawContext();
});
$("underline").hidden = !canUnderline;
$("underline").addEventListener("click", () => {
  isUnderlined = !isUnderlined;
  kept.set("underline", isUnderlined);
  drawDepths();
});
$("messages").addEventListener("mousemove", ({ clientX, clientY }) => {
  const found = isUnderlined && underlines.at(clientX, clientY);
  if (found) showDetails(found.range, `${found.depth} of ${scale.most} layers`, [], []);
  else hideDetails();
});
$("messages").addEventListener("mouseleave", hideDetails);
$("compare").addEventListener("click", () => {
  const last = tree.path(conversation).findLast(({ role }) => role === "user");
  sessionStorage.setItem("d3engine-question", last ? tree.contentOf(last) : "");
});
takeKeys(connect);
// A text that is dropped, and a short one that is pasted, stays the browser's matter.
document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
document.addEventListener("drop", (event) => takeFiles(event, event.dataTransfer.files));
$("prompt").addEventListener("paste", paste);
document.addEventListener("keydown", (event) => {
  const isPlain = !event.target.closest("input, textarea, select, dialog[open]");
  const name = `${event.ctrlKey || event.metaKey ? "Ctrl+" : ""}${event.shiftKey ? "Shift+" : ""}${event.key}`;
  const isInDialog = Boolean(event.target.closest("dialog"));
  if (name === "Escape" && document.body.classList.contains("listing") && !isInDialog) document.body.classList.remove("listing");
  else if (name === "Escape" && run() && !isInDialog) run().controller.abort();
  else if (name === "Ctrl+Shift+O" || name === "Ctrl+Shift+o") begin();
  else if (name === "Ctrl+k") showSidebar();
  else if (event.key === "?" && isPlain) $("help").showModal();
  else return;
  event.preventDefault();
});
$("theme").value = theme.chosen;
$("theme").addEventListener("change", () => theme.choose($("theme").value));
theme.watch(drawDepths);
addEventListener("pagehide", () => conversations.forEach((one) => runs.has(one.id) && save(one)));
for (const [target, name] of [[window, "pagehide"], [document, "visibilitychange"]]) {
  target.addEventListener(name, () => keptInTab.set("draft", { text: $("prompt").value, files }));
}
watchComparisons((is) => {
  isComparing = is;
  if (is) titling?.abort();
});
$("titles").checked = kept.get("titles", true);
$("titles").addEventListener("change", () => kept.set("titles", $("titles").checked));

drawIcons();
$("prompt").value = keptInTab.get("draft", {}).text ?? "";
draw();
connect();
isReady.then((isThere) => {
  if (!isThere) note("Answers are shown as plain text: the server was built without the page's Markdown libraries.");
  draw();
});
let waiting = null;
store.open(() => (waiting = note("Another tab has an older page: close it to see your conversations."))).then((found) => {
  waiting?.remove();
  if (found === null) note("This browser keeps no conversations: they are gone when the page is closed.");
  conversations.forEach(save); // what was made before
  folders.forEach((folder) => persist("folders", folder));
  conversations.push(...(found?.conversations ?? []));
  folders.push(...(found?.folders ?? []));
  drawList();
});
