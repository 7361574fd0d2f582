// Titles of conversations, written by the model after its answer: a short request that runs behind all others.

import { stream } from "./api.js";
import { requestMessages } from "./conversation.js";

const ASKED = "Write a title for this conversation, of at most six words. Answer with nothing but the title.";
const MOST_TOKENS = 24;
const MOST_WORDS = 10;
const LONGEST = 60;

/** A title for what `shown` has of a conversation; null where the model writes none. Raises `ApiError`, and what ends
 * `signal`. */
export async function titleOf(conversation, shown, model, signal) {
  const messages = [...requestMessages(conversation, shown), { role: "user", content: ASKED }];
  const body = { model, messages, max_tokens: MOST_TOKENS, temperature: 0, priority: 1, enable_thinking: false };
  let text = "";
  let isWhole = false;
  for await (const { choices = [] } of stream("v1/chat/completions", body, signal)) {
    for (const { delta, finish_reason: end } of choices) {
      text += delta?.content ?? "";
      isWhole ||= end === "stop";
    }
  }
  const title = text.trim().replace(/^(["“*# ]*)(conversation )?title: */i, "$1").replace(/^["'“*#_ ]+|["'”*_. ]+$/g, "");
  const isTitle = isWhole && title && !title.includes("\n") && title.length <= LONGEST;
  return isTitle && title.split(/\s+/).length <= MOST_WORDS ? title : null;
}

/** Whether a comparison of depths runs in any tab, where speed is measured. */
const comparisons = new BroadcastChannel("d3engine-comparing");

/** Call `told` when a comparison begins (true) and ends (false) in another tab. */
export const watchComparisons = (told) => (comparisons.onmessage = ({ data }) => told(data));
export const tellComparing = (isComparing) => comparisons.postMessage(isComparing);
