// The fields of sampling, whose names, bounds and words are the server's: it describes them in /openapi.json. An empty
// one is left out of the request, so that the server's default holds; where the first model's files do not say how to
// sample it, the page asks as `d3engine chat` does.

import { getJson } from "./api.js";
import { made } from "./icons.js";
import { kept } from "./store.js";

const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const UNUSED = ["n", "max_completion_tokens", "prompt_logprobs"]; // the page shows one answer, and nothing of prompts
const CHOICES = { enable_thinking: ["true", "false"], reasoning_effort: ["low", "medium", "high"] };
const TEXTS = ["stop", "json"];
const OWN = ["messages", "model", "n", "stream", "stream_options", "return_depths"]; // what the page itself sends

export class Settings {
  #inputs = new Map();
  #places = Array.from({ length: 3 }, () => made("div")); // for the numbers: the first ones, penalties, all others
  #chosen = kept.get("sampling", {}); // name -> text of each field that is not empty
  #defaults = {};
  #ofChats = {}; // what the page samples the first model with, whose files do not say it
  #isFirst = true;

  constructor(place) {
    const [first, penalties, others] = this.#places;
    place.append(
      first,
      this.#row("stop", "none", "Stop strings, one a line; the answer ends before one"),
      folded("Penalties", penalties),
      folded("Further", others),
      folded(
        "Reasoning",
        this.#row("enable_thinking", "the model's", "Where the model's template has a switch"),
        this.#row("reasoning_effort", "the model's", "Where the template knows low, medium, high"),
        this.#row("thinking_token_budget", "no limit", "Tokens of reasoning, where the model reasons"),
      ),
      folded("Other fields", this.#row("json", '{"ignore_eos": true}', "Added to the request as they are", "Fields as JSON")),
    );
    place.addEventListener("input", ({ target }) => this.#keep(target));
  }

  /** Take fields, bounds and defaults from the server. */
  async learn() {
    const [described, props] = await Promise.all(["openapi.json", "props"].map((path) => getJson(path).catch(() => null)));
    const found = [[], [], []];
    for (const [name, { anyOf = [] }] of Object.entries(described?.components.schemas.ChatRequest.properties ?? {})) {
      const kind = anyOf.find(({ type }) => type === "integer" || type === "number");
      if (!kind || UNUSED.includes(name)) continue;
      if (kind.description) {
        const help = kind.description.split(/\.(?: |$)/)[0].replaceAll("`", "").replace("; None: ", "; empty: ");
        found[FIRST.includes(name) ? 0 : /penalty|^dry/.test(name) ? 1 : 2].push(this.#row(name, "", help));
      }
      const input = this.#inputs.get(name);
      if (!input) continue;
      input.min = kind.minimum ?? kind.exclusiveMinimum ?? "";
      input.max = kind.maximum ?? "";
      input.step = kind.type === "integer" ? 1 : "any";
    }
    found[0].sort((one, other) => FIRST.indexOf(one.dataset.name) - FIRST.indexOf(other.dataset.name));
    this.#places.forEach((place, number) => place.replaceChildren(...found[number]));
    for (const name of Object.keys(this.#chosen)) if (described && !this.#inputs.has(name)) delete this.#chosen[name];
    const { repeat_penalty: repetition_penalty, ...own } = props?.default_generation_settings.params ?? {};
    this.#ofChats = props?.d3ext?.chat_defaults ?? {};
    this.#defaults = { ...own, repetition_penalty, ...this.#ofChats };
  }

  /** Show what holds where a field is empty: numbers of the server's first model, for that one. */
  showDefaults(isFirst) {
    this.#isFirst = isFirst;
    for (const [name, value] of Object.entries(this.#defaults)) {
      const input = this.#inputs.get(name);
      if (input && Number.isFinite(value)) input.placeholder = isFirst ? Number(value.toPrecision(4)) : "the model's";
    }
  }

  /** What is chosen, as fields of a request; fails with a sentence where it cannot be sent. */
  values() {
    for (const [name, input] of this.#inputs) {
      if (input.validity.badInput) throw new Error(`${labelOf(name)} must be a number.`);
    }
    const found = this.#isFirst ? { ...this.#ofChats } : {};
    for (const [name, text] of Object.entries(this.#chosen)) {
      const value = text.trim();
      if (value === "") continue;
      if (name === "json") Object.assign(found, fieldsOf(value));
      else if (name === "stop") found.stop = text.split("\n").filter(Boolean);
      else if (name === "enable_thinking") found[name] = value === "true";
      else found[name] = CHOICES[name] ? value : Number(value);
    }
    return found;
  }

  reset() {
    for (const input of this.#inputs.values()) input.value = "";
    this.#chosen = {};
    kept.set("sampling", this.#chosen);
  }

  #keep({ name, value }) {
    if (value === "") delete this.#chosen[name];
    else this.#chosen[name] = value;
    kept.set("sampling", this.#chosen);
  }

  #row(name, otherwise, help, label = labelOf(name)) {
    const input = made(TEXTS.includes(name) ? "textarea" : CHOICES[name] ? "select" : "input");
    if (input.localName === "input") Object.assign(input, { type: "number", step: "any" });
    if (input.localName === "textarea") input.rows = 2;
    if (CHOICES[name]) input.append(new Option(otherwise, ""), ...CHOICES[name].map((value) => new Option(value, value)));
    Object.assign(input, { name, id: `sampling-${name}`, placeholder: otherwise, value: this.#chosen[name] ?? "" });
    const hint = made("small", "hint", help);
    hint.id = `${input.id}-help`;
    input.setAttribute("aria-describedby", hint.id);
    this.#inputs.set(name, input);
    const named = made("label", "", label);
    named.htmlFor = input.id;
    const row = made("div", "field", named, input, hint);
    row.dataset.name = name;
    return row;
  }
}

const labelOf = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");
const folded = (title, ...rows) => made("details", "", made("summary", "", title), ...rows);

function fieldsOf(text) {
  try {
    const value = JSON.parse(text);
    const isObject = value && typeof value === "object" && !Array.isArray(value);
    if (isObject && !OWN.some((name) => name in value)) return value;
  } catch {
    // Said below.
  }
  throw new Error(`Fields as JSON must be an object without ${OWN.join(", ")}, as in {"ignore_eos": true}.`);
}
