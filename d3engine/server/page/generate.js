// One answer of the server, written into a message of a conversation as it comes.

import { stream } from "./api.js";

/** Stream the answer to `body` into `message`, behind what it holds already; `changed` is called after each chunk, before
 * the first with how far the prompt is computed. */
export async function generate(message, body, signal, changed) {
  const answer = new Answer(message);
  try {
    for await (const chunk of stream("v1/chat/completions", { ...body, ...WANTED }, signal)) {
      const progress = chunk.prompt_progress ?? null;
      if (!progress) answer.add(chunk);
      changed(progress);
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    message.end = isStopped ? "stopped" : "error";
    if (!isStopped) message.problem = error.message;
  }
  message.end ??= "stop";
}

const WANTED = { return_depths: true, return_progress: true, stream_options: { include_usage: true, continuous_usage_stats: true } };

class Answer {
  #asked = performance.now();
  #first = null;

  constructor(message) {
    this.message = message;
    this.before = { characters: Array.from(message.content).length, tokens: message.figures?.tokens ?? 0 };
    Object.assign(message, { end: null, problem: null });
    message.depths ??= [];
  }

  add({ choices = [], usage, d3ext }) {
    const { message } = this;
    for (const { delta = {}, finish_reason: end, d3ext: own } of choices) {
      message.content += delta.content ?? "";
      if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
      for (const call of delta.tool_calls ?? []) this.#call(call);
      if (own) own.depths.forEach((depth, i) => this.#depth(depth, own.token_offsets[i]));
      if (end) message.end = end;
    }
    if (usage) this.#count(usage, d3ext);
    if (d3ext) message.layers = { of: d3ext.num_layers, mean: d3ext.mean_layers };
  }

  #call({ index, function: called }) {
    const calls = (this.message.calls ??= []);
    const call = (calls[index] ??= { name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  /** `depths` has [offset in characters, depth] where the depth changes. Offsets of reasoning count that text too, so
   * depths are kept of answers without any. */
  #depth(depth, offset) {
    const { depths, reasoning } = this.message;
    if (reasoning) depths.length = 0;
    else if (depths.at(-1)?.[1] !== depth) depths.push([this.before.characters + offset, depth]);
  }

  /** Tokens per second as the engine has had them, once it says so; until then by this page's clock. */
  #count({ completion_tokens: tokens, total_tokens: context }, d3ext) {
    const now = performance.now();
    if (tokens > 0) this.#first ??= { at: now, tokens };
    const seconds = d3ext?.decode_seconds ?? (now - (this.#first?.at ?? now)) / 1000;
    const counted = tokens - (d3ext?.decode_seconds ? 1 : (this.#first?.tokens ?? 0));
    const rate = seconds > 0 && counted > 0 ? counted / seconds : this.message.figures?.rate;
    const wait = this.#first && (this.#first.at - this.#asked) / 1000;
    this.message.figures = { tokens: this.before.tokens + tokens, context, rate, wait };
  }
}
