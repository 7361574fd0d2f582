// The tokens of one answer, collected from a stream's chunks of either interface.

/** Depths, probabilities and letters of an answer as far as it has come.
 *
 * Text may lag behind its tokens, and offsets count characters, not UTF-16 units. So the text is kept as a list of
 * characters, and a token's own are those between its offset and the next one's.
 */
export class Tokens {
  depths = [];
  ids = [];
  known = []; // {token, logprob, top: [[text, logprob], ...]} or undefined
  finish = null;
  summary = null;
  #offsets = [];
  #characters = [];

  get length() {
    return this.depths.length;
  }

  get text() {
    return this.#characters.join("");
  }

  /** Take in a chunk; the number of the first token whose text may have changed. */
  add(chunk) {
    const settled = this.#firstUnsettled();
    for (const choice of chunk.choices ?? []) {
      const text = choice.delta ? choice.delta.content : choice.text;
      if (text) this.#characters.push(...Array.from(text));
      const extra = choice.d3ext;
      if (extra) {
        this.depths.push(...extra.depths);
        this.#offsets.push(...extra.token_offsets);
      }
      if (choice.token_ids) this.ids.push(...choice.token_ids);
      if (choice.logprobs) this.known.push(...alternatives(choice.logprobs));
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
    if (chunk.d3ext) this.summary = chunk.d3ext;
    return settled;
  }

  /** The letters of one token; empty for one that is not shown, or whose letters have not come yet. */
  letters(number) {
    const end = number + 1 < this.length ? this.#offsets[number + 1] : this.#characters.length;
    return this.#characters.slice(this.#offsets[number], end).join("");
  }

  meanLayers() {
    return this.length ? this.depths.reduce((sum, depth) => sum + depth, 0) / this.length : null;
  }

  #firstUnsettled() {
    let number = this.length;
    while (number > 0 && this.#end(number - 1) >= this.#characters.length) number -= 1;
    return number;
  }

  #end(number) {
    return number + 1 < this.length ? this.#offsets[number + 1] : Infinity;
  }
}

/** The log-probabilities of a chunk, chat's or completions', in one form. */
function alternatives(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      token,
      logprob,
      top: top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

/** Where two answers first differ: the number of a token, or null as long as they agree. */
export function firstDifference(one, other, areComplete) {
  const common = Math.min(one.ids.length, other.ids.length);
  for (let i = 0; i < common; i++) if (one.ids[i] !== other.ids[i]) return i;
  return areComplete && one.ids.length !== other.ids.length ? common : null;
}
