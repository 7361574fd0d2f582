// The fields of sampling. An empty one is left out of the request, so that the server's default holds; where the first
// model's files do not say how to sample it, the page asks as `d3engine chat` does.

import { getJson } from "./api.js";
import { made } from "./icons.js";
import { kept } from "./store.js";

// [name, label, the engine's default, what it does]; bounds come from the server's description of its API.
const GROUPS = [
  [
    null,
    ["temperature", "Temperature", 1, "Randomness; 0 always takes the likeliest token"],
    ["top_p", "Top p", 1, "Sample from the likeliest tokens with this much probability together"],
    ["top_k", "Top k", "all", "Sample from this many likeliest tokens"],
    ["min_p", "Min p", 0, "Leave out tokens below this share of the likeliest one's probability"],
    ["max_tokens", "Maximum tokens", "no limit", "Length of an answer; it ends with the context at the latest"],
    ["seed", "Seed", "random", "The same seed gives the same answer"],
    ["stop", "Stop strings", "none", "One a line; the answer ends before one"],
  ],
  [
    "Penalties",
    ["repetition_penalty", "Repetition", 1, "Above 1: fewer repeated tokens, of the prompt too"],
    ["presence_penalty", "Presence", 0, "Above 0: fewer tokens that the answer has already"],
    ["frequency_penalty", "Frequency", 0, "The same for each time that the token came"],
    ["dry_multiplier", "DRY multiplier", 0, "Above 0: fewer repeated sequences"],
    ["dry_base", "DRY base", 1.75, "Growth of the penalty with the sequence's length"],
    ["dry_allowed_length", "DRY allowed length", 2, "Sequences up to this length are free"],
  ],
  [
    "Further",
    ["typical_p", "Typical p", 1, "Locally typical sampling; 1 is off"],
    ["top_n_sigma", "Top n sigma", 0, "Keep logits within this many deviations of the largest"],
    ["xtc_probability", "XTC probability", 0, "How often the likeliest tokens are left out"],
    ["xtc_threshold", "XTC threshold", 0.1, "What counts as likely"],
    ["min_tokens", "Minimum tokens", 0, "The answer does not end before this many"],
  ],
  [
    "Reasoning",
    ["enable_thinking", "Thinking", "the model's", "Where the model's template has a switch"],
    ["reasoning_effort", "Effort", "the model's", "Where the template knows low, medium, high"],
    ["thinking_token_budget", "Thinking budget", "no limit", "Tokens of reasoning, where the model reasons"],
  ],
  ["Other fields", ["json", "Fields as JSON", '{"ignore_eos": true}', "Added to the request as they are"]],
];
const CHOICES = { enable_thinking: ["true", "false"], reasoning_effort: ["low", "medium", "high"] };
const TEXTS = ["stop", "json"];
const OWN = ["messages", "model", "n", "stream", "stream_options", "return_depths"]; // what the page itself sends

export class Settings {
  #inputs = new Map();
  #defaults = {};
  #ofChats = {}; // what the page samples the first model with, whose files do not say it
  #isFirst = true;

  constructor(place) {
    for (const [title, ...fields] of GROUPS) {
      const rows = fields.map((field) => this.#row(field));
      if (title === null) place.append(...rows);
      else place.append(made("details", "", made("summary", "", title), ...rows));
    }
    for (const [name, value] of Object.entries(kept.get("sampling", {}))) {
      const input = this.#inputs.get(name);
      if (input) input.value = value;
    }
    place.addEventListener("input", () => this.#keep());
  }

  /** Take bounds and defaults from the server. */
  async learn() {
    const [described, props] = await Promise.all(["openapi.json", "props"].map((path) => getJson(path).catch(() => null)));
    const properties = described?.components.schemas.ChatRequest.properties ?? {};
    for (const [name, input] of this.#inputs) {
      const bounds = properties[name]?.anyOf?.find(({ type }) => type !== "null") ?? {};
      if (input.type !== "number") continue;
      input.min = bounds.minimum ?? bounds.exclusiveMinimum ?? "";
      input.max = bounds.maximum ?? "";
      input.step = bounds.type === "integer" ? 1 : "any";
    }
    const { repeat_penalty, n_predict: _, ...own } = props?.default_generation_settings.params ?? {};
    this.#defaults = { ...own, ...(repeat_penalty === undefined ? {} : { repetition_penalty: repeat_penalty }) };
    if (own.top_k <= 0) delete this.#defaults.top_k;
    Object.assign(this.#defaults, (this.#ofChats = props?.d3ext?.chat_defaults ?? {}));
  }

  /** Show what holds where a field is empty: numbers of the server's first model, for that one. */
  showDefaults(isFirst) {
    this.#isFirst = isFirst;
    for (const [name, value] of Object.entries(this.#defaults)) {
      const input = this.#inputs.get(name);
      if (input) input.placeholder = isFirst ? Number(value.toPrecision(4)) : "the model's";
    }
  }

  /** What is chosen, as fields of a request; fails with a sentence where it cannot be sent. */
  values() {
    const found = this.#isFirst ? { ...this.#ofChats } : {};
    for (const [name, input] of this.#inputs) {
      const value = input.value.trim();
      if (input.validity.badInput) throw new Error(`${labelOf(name)} must be a number.`);
      if (value === "") continue;
      if (name === "json") Object.assign(found, fieldsOf(value));
      else if (name === "stop") found.stop = input.value.split("\n").filter(Boolean);
      else if (name === "enable_thinking") found[name] = value === "true";
      else found[name] = CHOICES[name] ? value : Number(value);
    }
    return found;
  }

  reset() {
    for (const input of this.#inputs.values()) input.value = "";
    this.#keep();
  }

  #keep() {
    const filled = [...this.#inputs].filter(([, input]) => input.value !== "");
    kept.set("sampling", Object.fromEntries(filled.map(([name, input]) => [name, input.value])));
  }

  #row([name, label, otherwise, help]) {
    const input = made(TEXTS.includes(name) ? "textarea" : CHOICES[name] ? "select" : "input");
    if (input.localName === "input") Object.assign(input, { type: "number", step: "any" });
    if (input.localName === "textarea") input.rows = 2;
    if (CHOICES[name]) input.append(new Option(otherwise, ""), ...CHOICES[name].map((value) => new Option(value, value)));
    input.id = `sampling-${name}`;
    input.placeholder = otherwise;
    const hint = made("small", "hint", help);
    hint.id = `${input.id}-help`;
    input.setAttribute("aria-describedby", hint.id);
    this.#inputs.set(name, input);
    const named = made("label", "", label);
    named.htmlFor = input.id;
    return made("div", "field", named, input, hint);
  }
}

const labelOf = (name) => GROUPS.flat().find((field) => Array.isArray(field) && field[0] === name)[1];

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
