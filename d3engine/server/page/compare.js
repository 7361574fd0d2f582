// The page as a whole: what is chosen, what runs, and what is said of it.

import { getJson, takeKeys, tell, tellRefusal } from "./api.js";
import { DepthScale } from "./colours.js";
import { Follower } from "./follow.js";
import { Pane } from "./pane.js";
import { drawLegend } from "./strip.js";
import { theme } from "./theme.js";
import { tellComparing } from "./titles.js";
import { firstDifference } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const scale = new DepthScale();
const panes = [new Pane(scale, draw), new Pane(scale, draw)];
$("panes").append(...panes.map((pane) => pane.element));
const follower = new Follower($("panes"));
let models = [];
let running = null;

const isComparing = () => $("compare").checked;
const isChat = () => document.querySelector("input[name=mode]:checked").value === "chat";
const maxTokens = () => Math.min(Math.max(Math.floor(Number($("max-tokens").value)) || 1, 1), 100_000);
const shownPanes = () => (isComparing() ? panes : [panes[0]]);

// -- what is there to ask ---------------------------------------------------------------------------------------------

async function load() {
  tell(null);
  try {
    models = (await getJson("v1/models")).data;
    $("key-form").hidden = true;
  } catch (error) {
    tellRefusal(error);
    $("run").disabled = true;
    return;
  }
  const bases = models.filter(({ parent, d3ext }) => parent === null && d3ext); // others are not loaded yet
  $("model").replaceChildren(...bases.map(({ id }) => new Option(id, id)));
  offer();
  $("run").disabled = false;
  const info = await getJson("tokenizer_info").catch(() => ({}));
  if (info.chat_template === null) {
    document.querySelector("input[value=completion]").checked = true;
    changeMode();
  }
}

/** The server's own depth; to compare with it full depth, or where that is its own, D3 that skips nothing yet. */
function offer() {
  const model = models.find(({ id }) => id === $("model").value);
  const aliases = models.filter(({ parent }) => parent !== null && parent === model.root);
  panes[0].offer(model, aliases, "auto");
  panes[1].offer(model, aliases, model.d3ext.depth.policy === "full" ? "d3" : "full");
  draw();
}

function changeMode() {
  $("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  $("prompt").placeholder = isChat() ? "Ask the model something" : "Begin a text for the model to go on with";
}

// -- how it looks -----------------------------------------------------------------------------------------------------

function draw() {
  if (!models.length) return;
  panes[1].element.hidden = !isComparing();
  $("panes").classList.toggle("at-once", isComparing() && !$("in-turn").checked); // they slow each other down: no speed
  scale.set(panes[0].layers, Math.min(...shownPanes().map((pane) => pane.leastLayers(maxTokens()))));
  for (const pane of shownPanes()) pane.draw(maxTokens());
  $("legend").hidden = false;
  drawLegend($("legend"), scale);
  showDifference();
}

/** A depth below all that were drawn so far gets a colour of its own. */
function widenScale() {
  const lowest = Math.min(...shownPanes().map((pane) => pane.turns.at(-1)?.tokens.depths.at(-1) ?? Infinity));
  if (lowest < scale.least) draw();
}

function showDifference() {
  const { number, sentence } = difference();
  $("difference").textContent = sentence;
  $("difference").hidden = !sentence;
  $("difference").classList.toggle("found", number !== null);
}

/** The first token at which the answers differ, or null, and what to say of them, which may be nothing. */
function difference() {
  const turns = panes.map((pane) => pane.turns.at(-1));
  if (!isComparing() || turns.some((turn) => !turn?.tokens.length)) return { number: null, sentence: "" };
  if (turns[0].asked !== turns[1].asked) return { number: null, sentence: "The panes have had different conversations." };
  const areComplete = turns.every((turn) => !turn.isRunning && turn.tokens.finish);
  const number = firstDifference(turns[0].tokens, turns[1].tokens, areComplete);
  if (number === null) {
    return { number, sentence: areComplete ? "Both answers are the same." : "The answers agree so far." };
  }
  for (const turn of turns) turn.markDifference(number);
  return { number, sentence: `The answers differ first at token ${number + 1}.` };
}

// -- what it does -----------------------------------------------------------------------------------------------------

async function run(question) {
  running = new AbortController();
  tellComparing(true);
  follower.begin();
  setButtons();
  $("status").textContent = "Generating.";
  const ask = { isChat: isChat(), sampling: sampling(), signal: running.signal, progress };
  const shown = shownPanes();
  const turns = [];
  if ($("in-turn").checked) for (const pane of shown) turns.push(await pane.run(question, ask));
  else turns.push(...(await Promise.all(shown.map((pane) => pane.run(question, ask)))));
  running = null;
  tellComparing(false);
  setButtons();
  draw();
  $("status").textContent = turns.map((turn, i) => spoken(shown[i].name, turn)).join(" ") + ` ${difference().sentence}`;
}

/** A message is sent and gone; a prompt stays, to be changed and run again. */
function runPrompt() {
  const question = $("prompt").value;
  if (running || $("run").disabled || !question.trim()) return;
  if (isChat()) $("prompt").value = "";
  run(question);
}

function progress() {
  widenScale();
  showDifference();
}

/** What a screen reader says when all is done: once, not at every token. */
function spoken(name, turn) {
  const problem = turn.element.querySelector(".error").textContent;
  return problem ? `${name}: ${problem}` : `${name}, ${turn.words()}: ${turn.tokens.text}`;
}

function sampling() {
  const number = (id) => ($(id).value === "" ? {} : { [id.replace("-", "_")]: Number($(id).value) });
  return { ...number("max-tokens"), ...number("temperature"), ...number("seed") };
}

function setButtons() {
  const hasTurns = panes.some((pane) => pane.turns.length > 0);
  $("run").disabled = running !== null;
  $("stop").disabled = running === null;
  $("retry").disabled = $("clear").disabled = running !== null || !hasTurns;
  $("model").disabled = $("compare").disabled = $("in-turn").disabled = running !== null;
  for (const pane of panes) pane.select.disabled = running !== null;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  runPrompt();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  runPrompt();
});
$("stop").addEventListener("click", () => running?.abort());
$("retry").addEventListener("click", () => {
  const question = panes[0].takeBack(); // which has them all: the other one only those that were compared
  if (isComparing() && panes[1].turns.at(-1)?.question === question) panes[1].takeBack();
  run(question);
});
$("clear").addEventListener("click", () => {
  for (const pane of panes) pane.clear();
  setButtons();
  draw();
  $("prompt").focus();
});
takeKeys(load);
$("model").addEventListener("change", offer);
for (const name of ["compare", "in-turn"]) $(name).addEventListener("change", draw);
$("max-tokens").addEventListener("input", draw);
$("mode").addEventListener("change", changeMode);
theme.watch(draw);
addEventListener("pagehide", () => running && tellComparing(false));
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== width) draw(); // its height changes with each line of an answer
  width = contentRect.width;
}).observe($("panes"));

$("prompt").value = sessionStorage.getItem("d3engine-question") ?? ""; // the chat's last
load();
