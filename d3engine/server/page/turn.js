// One question and its answer in a pane: coloured tokens, the strip below them, and the figures.

import { copied } from "./clipboard.js";
import { hideDetails, percent, showDetails, visible } from "./details.js";
import { made } from "./icons.js";
import { drawStrip } from "./strip.js";
import { Tokens } from "./tokens.js";

const ENDS = { stop: "the model", length: "the limit of tokens" };

export class Turn {
  tokens = new Tokens();
  isRunning = true;
  #spans = [];
  #asked = performance.now();
  #last = null;
  #isDirty = false;
  #different = null;

  /** `how`: {layers, first, scale}, of the model and of the policy that this answer runs under. */
  constructor(question, how) {
    this.question = question;
    this.how = how;
    this.element = document.getElementById("turn-template").content.cloneNode(true).firstElementChild;
    this.#part(".question").textContent = question;
    this.#answer.setAttribute("aria-busy", "true");
    this.#listen();
  }

  add(chunk) {
    const before = this.tokens.length;
    const from = this.tokens.add(chunk);
    if (this.tokens.length > before) this.#last = performance.now();
    for (let number = from; number < this.tokens.length; number++) this.#write(number);
    this.draw();
  }

  /** The answer is complete, was stopped, or has failed with a sentence. */
  end({ isStopped = false, problem = null } = {}) {
    this.isRunning = false;
    this.#answer.removeAttribute("aria-busy");
    this.#part(".end").textContent = problem ? "an error" : isStopped ? "you" : (ENDS[this.tokens.finish] ?? "the server");
    if (problem) {
      this.#part(".error").textContent = problem;
      this.#part(".error").hidden = false;
    }
    this.draw();
  }

  /** Mark the token at which this answer leaves the one beside it. */
  markDifference(number) {
    if (this.#different === number) return;
    this.#different = number;
    this.#spans[number]?.classList.add("differs");
  }

  /** Draw strip and figures at the next frame. */
  draw() {
    if (this.#isDirty) return;
    this.#isDirty = true;
    requestAnimationFrame(() => {
      this.#isDirty = false;
      if (this.element.isConnected) this.#draw();
    });
  }

  /** One sentence on how it went. */
  words() {
    const { length } = this.tokens;
    const count = `${length} ${length === 1 ? "token" : "tokens"}`;
    return length ? `${count}, ${this.tokens.meanLayers().toFixed(1)} of ${this.how.layers} layers on average` : "no tokens";
  }

  get #answer() {
    return this.#part(".answer");
  }

  #part(selector) {
    return this.element.querySelector(selector);
  }

  #write(number) {
    let span = this.#spans[number];
    if (!span) {
      span = made("span", `token depth-${this.tokens.depths[number]}`);
      span.tabIndex = number === 0 ? 0 : -1;
      span.setAttribute("aria-describedby", "details");
      this.#spans.push(span);
      this.#answer.append(span);
      if (number === this.#different) span.classList.add("differs");
    }
    const letters = this.tokens.letters(number);
    if (span.textContent !== letters) span.textContent = letters;
    span.hidden = letters === "";
  }

  #draw() {
    const { tokens, how } = this;
    const shown = tokens.length > 0;
    for (const name of [".strip", ".figures", ".copy"]) this.#part(name).hidden = !shown;
    if (!shown) return;
    drawStrip(this.#part(".strip"), tokens.depths, how);
    this.#part(".strip").setAttribute("aria-label", `Layers of each token: ${this.words()}.`);
    this.#part(".count").textContent = tokens.length;
    const rate = this.#rate();
    this.#part(".rate").textContent = Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : "–";
    this.#part(".layers").textContent = `${tokens.meanLayers().toFixed(2)} of ${how.layers}`;
    this.#part(".cache").textContent = this.#cache();
  }

  /** Tokens per second: the engine's, without the prompt, once it has told; until then by this page's clock, from the
   * question on. To draw a short answer takes a browser longer than a small model to write it. */
  #rate() {
    const { length, summary } = this.tokens;
    if (summary?.decode_seconds && length > 1) return (length - 1) / summary.decode_seconds;
    return (1000 * length) / (this.#last - this.#asked);
  }

  /** What is held of the cache: layers while it runs; the server says how many bytes that has saved. */
  #cache() {
    const saved = this.tokens.summary?.kv_bytes_saved;
    if (saved !== undefined) return saved ? `${bytes(saved)} less` : "all";
    const held = this.how.first === null ? this.how.layers : this.tokens.depths.at(-1);
    return `${held} of ${this.how.layers} layers`;
  }

  #listen() {
    const answer = this.#answer;
    const numberOf = (target) => this.#spans.indexOf(target);
    const show = (event) => {
      const number = numberOf(event.target);
      if (number >= 0) this.#show(number);
    };
    for (const name of ["mouseover", "focusin"]) answer.addEventListener(name, show);
    for (const name of ["mouseout", "focusout"]) answer.addEventListener(name, hideDetails);
    answer.addEventListener("click", (event) => event.target.focus());
    answer.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hideDetails();
      const next = this.#next(numberOf(event.target), event.key);
      if (next === null) return undefined;
      event.preventDefault();
      return this.#focus(next);
    });
    this.#part(".copy").addEventListener("click", () => this.#copy());
  }

  /** The token that a key leads to, over those without letters; null where it leads nowhere. */
  #next(number, key) {
    const seen = this.#spans.map((span, i) => (span.hidden ? -1 : i)).filter((i) => i >= 0);
    const place = seen.indexOf(number);
    const found = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: seen.length - 1 }[key];
    return found === undefined ? null : (seen[found] ?? null);
  }

  #focus(number) {
    for (const span of this.#spans) span.tabIndex = -1;
    this.#spans[number].tabIndex = 0;
    this.#spans[number].focus();
  }

  #show(number) {
    const known = this.tokens.known[number];
    const rows = [["Layers", `${this.tokens.depths[number]} of ${this.how.layers}`]];
    if (known && known.logprob !== null) rows.push(["Probability", percent(known.logprob)]);
    if (number === this.#different) rows.push(["Here", "the answers differ first"]);
    const heading = `Token ${number + 1}: ${visible(this.tokens.letters(number))}`;
    showDetails(this.#spans[number], heading, rows, known?.top ?? []);
  }

  async #copy() {
    const button = this.#part(".copy");
    const isCopied = await copied(this.tokens.text);
    button.textContent = isCopied ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}

function bytes(count) {
  if (count < 1024) return `${count} B`;
  const power = Math.min(3, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toPrecision(3)} ${["", "KiB", "MiB", "GiB"][power]}`;
}
