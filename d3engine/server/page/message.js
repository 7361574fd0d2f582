// A message as it stands on the page: a question, or an answer with its reasoning, calls and figures.

import { contentOf } from "./conversation.js";
import { button, icon, iconButton, made } from "./icons.js";
import { Markdown, showCopied } from "./markdown.js";

const ENDS = { length: "token limit reached", stopped: "stopped", error: "failed", edited: "edited" };

export class MessageView {
  #markdown = null;

  /** `act(name, message, value)` is called for what its buttons ask for, and returns whether that can be done now. */
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.element = made("article", `message ${message.role}`);
    this.element.setAttribute("aria-label", message.role === "user" ? "Question" : "Answer");
    this.body = made("div", "body");
    this.actions = made("div", "actions");
    this.element.append(this.body, this.actions);
    if (message.role === "user") this.#writeQuestion();
    else this.#makeAnswer();
  }

  /** Show what has come of an answer; `progress` is how far its prompt is computed, where that is known. */
  write(isRunning, progress = null) {
    const { reasoning, content, calls, problem, end } = this.message;
    this.answer.setAttribute("aria-busy", String(isRunning));
    this.reasoning.hidden = !reasoning;
    if (reasoning) {
      const isThinking = isRunning && !content;
      this.reasoning.querySelector("summary").textContent = isThinking ? "Thinking…" : "Reasoning";
      this.reasoning.lastElementChild.textContent = reasoning;
    }
    this.waits.hidden = !isRunning || Boolean(content || reasoning || calls);
    if (!this.waits.hidden) this.#writeProgress(progress);
    this.#markdown.write(content);
    this.calls.replaceChildren(...(calls ?? []).map(callOf));
    this.problem.textContent = problem ?? "";
    this.problem.hidden = !problem;
    this.figures.replaceChildren(figuresOf(this.message, isRunning ? null : (end ?? "stopped")));
    if (!isRunning && this.message.model) this.figures.append(made("span", "by", ` · ${this.message.model}`));
  }

  /** Offer what can be done: `isBusy` while something runs in the conversation; `branches` are the turn's. */
  offer({ isBusy, branches, isLast }) {
    const { message } = this;
    const acting = (name, drawn, words) => iconButton(drawn, words, () => this.act(name, message));
    const isAnswer = message.role === "assistant";
    const copy = iconButton("copy", "Copy", () => showCopied(copy, isAnswer ? message.content : contentOf(message)));
    const shown = [copy];
    if (!isBusy) {
      if (!isAnswer || (message.content && !message.calls)) shown.push(iconButton("edit", "Edit", () => this.edit()));
      if (isAnswer) shown.push(acting("regenerate", "again", "Regenerate"));
      if (isAnswer && isLast && canGoOn(message)) shown.push(acting("continue", "goOn", "Continue"));
      shown.push(acting("remove", "remove", "Delete this message and all after it"));
    }
    if (branches.length > 1) shown.push(this.#arrows(branches, isBusy));
    if (isAnswer) shown.push(this.figures);
    this.actions.replaceChildren(...shown);
  }

  /** Let the text be changed in its place: a question is asked anew, an answer is kept as one more branch. */
  edit() {
    const open = this.body.querySelector(".editing textarea");
    if (open) return open.focus();
    const isAnswer = this.message.role === "assistant";
    const covered = (isAnswer ? [this.answer] : [...this.body.children]).filter(({ hidden }) => !hidden);
    const area = made("textarea");
    area.value = this.message.content;
    area.rows = Math.min(12, area.value.split("\n").length + 1);
    area.setAttribute("aria-label", `Edit the ${isAnswer ? "answer" : "question"}`);
    const leave = () => {
      editing.remove();
      for (const element of covered) element.hidden = false;
    };
    const finish = () => {
      const isSomething = area.value.trim() || (!isAnswer && this.message.files);
      // What cannot be done now, which the page says, is not lost.
      if (!isSomething || this.act(isAnswer ? "rewrite" : "edit", this.message, area.value)) leave();
    };
    area.addEventListener("keydown", (event) => {
      const isMeant = isAnswer ? event.ctrlKey || event.metaKey : !event.shiftKey; // an answer has many lines
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && isMeant && !event.isComposing) finish();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const buttons = made("div", "row", button("", leave, "Cancel"), button("main", finish, isAnswer ? "Save" : "Send"));
    const editing = made("div", "editing", area, buttons);
    for (const element of covered) element.hidden = true;
    if (isAnswer) this.answer.after(editing);
    else this.body.append(editing);
    return area.focus();
  }

  #writeProgress(progress) {
    const { total, processed } = progress ?? {};
    const count = progress ? `: ${processed.toLocaleString("en")} of ${total.toLocaleString("en")} tokens` : "…";
    this.waits.firstElementChild.textContent = `Reading the prompt${count}`;
    const bar = this.waits.lastElementChild;
    bar.hidden = !progress;
    Object.assign(bar, { max: total ?? 1, value: processed ?? 0 });
  }

  #arrows(branches, isBusy) {
    const place = branches.indexOf(this.message);
    const arrow = (drawn, words, other) => {
      const made = iconButton(drawn, words, () => this.act("show", other));
      made.disabled = isBusy || !other;
      return made;
    };
    return made(
      "span",
      "branches",
      arrow("earlier", "Earlier branch", branches[place - 1]),
      made("span", "", `${place + 1}/${branches.length}`),
      arrow("later", "Later branch", branches[place + 1]),
    );
  }

  #writeQuestion() {
    const { content, files = [] } = this.message;
    const chips = files.map(({ name, text }) => {
      const chip = made("details", "file", made("summary", "", icon("file"), name), made("pre", "", text));
      chip.lastElementChild.tabIndex = 0;
      return chip;
    });
    this.body.replaceChildren(...chips, ...(content ? [made("p", "question", content)] : []));
  }

  #makeAnswer() {
    this.reasoning = made("details", "reasoning", made("summary"), made("div"));
    const bar = made("progress");
    bar.setAttribute("aria-label", "The prompt");
    this.waits = made("div", "waits hint", made("span"), bar);
    this.answer = made("div", "answer markdown");
    this.answer.dir = "auto";
    this.calls = made("div");
    this.problem = made("p", "error");
    this.figures = made("span", "figures hint");
    this.body.append(this.reasoning, this.waits, this.answer, this.calls, this.problem);
    this.#markdown = new Markdown(this.answer);
  }
}

const canGoOn = ({ end, content, calls }) => end !== "stop" && Boolean(content) && !calls;

function callOf({ name, arguments: given }) {
  const shown = made("pre", "", given);
  shown.tabIndex = 0;
  const call = made("details", "call", made("summary", "", "Calls ", made("code", "", name)), shown);
  call.open = true;
  return call;
}

/** What is said of an answer: how long it is, how fast it came, how it ended. */
function figuresOf({ figures, layers }, end) {
  const { tokens, rate, wait } = figures ?? {};
  const parts = [];
  if (tokens) parts.push(`${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`);
  if (rate) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  if (wait && end) parts.push(`${wait.toFixed(wait < 10 ? 2 : 0)} s to the first token`);
  if (layers?.mean && layers.mean < layers.of) parts.push(`${layers.mean.toFixed(1)} of ${layers.of} layers`);
  if (ENDS[end]) parts.push(ENDS[end]);
  return parts.join(" · ");
}
