// A pane: one depth policy, its schedule before anything runs, and the answers under it.

import { stream } from "./api.js";
import { depthsOf, leastDepth, windowStart, words } from "./schedule.js";
import { drawStrip } from "./strip.js";
import { Turn } from "./turn.js";

const DRAWN_STEPS = 64;

export class Pane {
  turns = [];
  #model = null;

  /** `changed` is called when another policy is chosen. */
  constructor(scale, changed) {
    this.scale = scale;
    this.element = document.getElementById("pane-template").content.cloneNode(true).firstElementChild;
    this.select = this.#part(".depth");
    for (const input of [this.select, this.#part(".alpha"), this.#part(".start")]) {
      input.addEventListener("input", changed);
    }
  }

  /** Offer the depths of a model; `chosen` is the value of one of them. */
  offer(model, aliases, chosen) {
    this.#model = model;
    const own = model.d3ext.depth;
    const choices = [
      ["full", "Full depth"],
      ["auto", `The server's own (${words(own)})`],
      ["d3", "D3, chosen here"],
      ...aliases.map((alias) => [`model:${alias.id}`, `${alias.id} (${words(alias.d3ext.depth)})`]),
    ];
    this.aliases = aliases;
    this.select.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
    this.select.value = chosen;
    const start = [own, model.d3ext.certified_depth].find((one) => one?.policy === "d3") ?? { alpha: 1, start: 0.8 };
    this.#part(".alpha").value = start.alpha;
    this.#part(".start").value = start.start;
  }

  get layers() {
    return this.#model.d3ext.num_layers;
  }

  /** The policy chosen, as the server describes it. */
  get policy() {
    const chosen = this.select.value;
    if (chosen === "auto") return this.#model.d3ext.depth;
    if (chosen === "full") return { policy: "full" };
    if (chosen === "d3") {
      return { policy: "d3", alpha: Number(this.#part(".alpha").value), start: Number(this.#part(".start").value) };
    }
    return this.aliases.find(({ id }) => `model:${id}` === chosen).d3ext.depth;
  }

  /** Whether the server certifies the policy for this model, as far as it is known before a run. */
  get isCertified() {
    const { policy, layers } = this;
    if (policy.policy === "full" || leastDepth(policy, layers) === layers) return true;
    const cards = [this.#model, ...this.aliases].map(({ d3ext }) => d3ext);
    const known = cards[0].certified_depth;
    if (known) cards.push({ certified: true, depth: known });
    const options = ({ policy: name, alpha, start, tail = 0, on_skip = "none" }) => [name, alpha, start, tail, on_skip].join();
    if (this.select.value === "d3") {
      return cards.some(({ certified, depth }) => certified && options(depth) === options(policy));
    }
    return cards.find(({ depth }) => depth === policy).certified;
  }

  get name() {
    return words(this.policy);
  }

  /** The fewest layers that the policy is known to run within so many tokens, or ran here. */
  leastLayers(steps) {
    const ran = this.turns.flatMap((turn) => turn.tokens.depths);
    return [...(depthsOf(this.policy, this.layers, steps) ?? []), ...ran].reduce((a, b) => Math.min(a, b), this.layers);
  }

  /** Draw everything anew: of another policy, in other colours, or at another width. */
  draw(maxTokens) {
    const { policy, layers, scale } = this;
    this.element.setAttribute("aria-label", this.name);
    this.#part(".sliders").hidden = this.select.value !== "d3";
    for (const name of ["alpha", "start"]) {
      const input = this.#part(`.${name}`);
      input.nextElementSibling.textContent = input.value;
    }
    const depths = depthsOf(policy, layers, Math.max(1, maxTokens));
    const canvas = this.#part(".schedule");
    canvas.hidden = depths === null;
    const said = depths ? sentence(depths, layers, windowStart(policy, layers)) : UNKNOWN;
    this.#part(".schedule-words").textContent = said;
    this.#part(".uncalibrated").hidden = Boolean(this.#model.d3ext.certified_depth);
    this.#part(".uncertified").hidden = this.isCertified;
    canvas.setAttribute("aria-label", `Schedule: ${said}`);
    if (depths) drawStrip(canvas, depths.slice(0, DRAWN_STEPS), { layers, first: windowStart(policy, layers), scale });
    for (const turn of this.turns) turn.draw();
  }

  /** Run a question. `ask`: {isChat, sampling, signal, progress}; `progress` is called after each chunk. */
  async run(question, ask) {
    const { policy, layers, scale } = this;
    const request = this.#request(question, ask);
    const first = policy.policy === "full" ? layers : windowStart(policy, layers);
    const turn = new Turn(question, { layers, first, scale });
    turn.isChat = ask.isChat;
    turn.asked = JSON.stringify(request.body.messages?.filter(({ role }) => role === "user"));
    this.turns.push(turn);
    this.#part(".turns").append(turn.element);
    try {
      for await (const chunk of this.#chunks(request, ask.signal)) {
        turn.add(chunk);
        ask.progress();
      }
      turn.end();
    } catch (error) {
      turn.end(error.name === "AbortError" ? { isStopped: true } : { problem: error.message });
    }
    ask.progress();
    return turn;
  }

  /** Forget the last answer; its question. */
  takeBack() {
    const turn = this.turns.pop();
    turn?.element.remove();
    return turn?.question ?? null;
  }

  clear() {
    while (this.turns.length) this.takeBack();
  }

  /** Alternatives are left out where the server's owner allows none. */
  async *#chunks({ path, body }, signal) {
    try {
      yield* stream(path, body, signal);
    } catch (error) {
      if (!["logprobs", "top_logprobs"].includes(error.param)) throw error;
      const { logprobs: _, top_logprobs: __, ...rest } = body;
      yield* stream(path, rest, signal);
    }
  }

  #request(question, { isChat, sampling }) {
    const chosen = this.select.value;
    const body = { ...sampling, model: this.#model.id, return_depths: true, return_token_ids: true };
    if (chosen.startsWith("model:")) body.model = chosen.slice("model:".length);
    else if (chosen !== "auto") body.depth = chosen === "full" ? "full" : this.policy;
    if (!isChat) return { path: "v1/completions", body: { ...body, prompt: question, logprobs: 5 } };
    const messages = [...this.#conversation(), { role: "user", content: question }];
    return { path: "v1/chat/completions", body: { ...body, messages, logprobs: true, top_logprobs: 5 } };
  }

  *#conversation() {
    for (const turn of this.turns) {
      if (!turn.isChat || !turn.tokens.text) continue;
      yield { role: "user", content: turn.question };
      yield { role: "assistant", content: turn.tokens.text };
    }
  }

  #part(selector) {
    return this.element.querySelector(selector);
  }
}

const UNKNOWN = "Which layers this policy runs is known when it has run.";

function sentence(depths, layers, first) {
  const last = depths.at(-1);
  if (last === layers) return `All ${layers} layers for each token.`;
  const mean = depths.reduce((sum, depth) => sum + depth, 0) / depths.length;
  const from = depths.indexOf(last) + 1;
  return (
    `${layers} layers for the first token, ${last} from token ${from} on, ${mean.toFixed(1)} on average over ` +
    `${depths.length} tokens; layers from ${first} on are skipped first.`
  );
}
