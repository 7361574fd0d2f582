// Markdown as elements, by the libraries in the folder `vendor`, which the build fetches; without them, plain text.
// Whatever a model writes goes through DOMPurify before it becomes an element.

import { copied } from "./clipboard.js";
import { iconButton, made } from "./icons.js";
import { canPreview, preview } from "./preview.js";

const LONGEST_COLOURED = 50_000;
const CLEAN = { RETURN_DOM_FRAGMENT: true, USE_PROFILES: { html: true }, FORBID_TAGS: ["img", "style", "form", "input"], FORBID_ATTR: ["style"] };
let markdown = null;
let highlighter = null;
let katex = null;

/** Whether the libraries are there, once that is known. */
export const isReady = load();

async function load() {
  try {
    const [parser, colours] = await Promise.all(
      ["markdown-it.js", "highlight.js", "purify.js", "tex.js"].map((name) => import(`./vendor/${name}`)),
    );
    highlighter = colours.default;
    markdown = parser.default({ linkify: true, highlight: coloured });
    markdown.disable("image"); // a request to another host
    markdown.use(globalThis.mdItPluginTex.tex, { delimiters: "all", mathFence: true, render: placeForMath });
    markdown.core.ruler.push("alignment", alignByClass);
    markdown.renderer.rules.table_open = () => '<div class="table" tabindex="0"><table>';
    markdown.renderer.rules.table_close = () => "</table></div>";
    return true;
  } catch {
    markdown = null;
    return false;
  }
}

/** The elements of a text that grows: blocks that have not changed stay as they are. */
export class Markdown {
  #sources = [];
  #shows = null;

  constructor(element) {
    this.element = element;
  }

  write(text) {
    if (this.#shows !== markdown) this.element.replaceChildren();
    if (this.#shows !== markdown) this.#sources = [];
    this.#shows = markdown;
    this.element.classList.toggle("plain", markdown === null);
    if (markdown === null) this.element.textContent = text;
    else this.#writeBlocks(text);
  }

  #writeBlocks(text) {
    const environment = {};
    const found = blocks(markdown.parse(text, environment));
    const lines = text.split("\n");
    const sources = found.map(([{ type, map }]) => type + lines.slice(...(map ?? [0])).join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.#sources[same]) same += 1;
    while (this.element.childElementCount > same) this.element.lastElementChild.remove();
    for (const tokens of found.slice(same)) {
      const html = markdown.renderer.render(tokens, markdown.options, environment);
      this.element.append(finished(made("div", "", globalThis.DOMPurify.sanitize(html, CLEAN))));
    }
    this.#sources = sources;
  }
}

/** The tokens of each block of the highest level. */
function blocks(tokens) {
  const found = [];
  let isOpen = false;
  for (const token of tokens) {
    if (isOpen) found.at(-1).push(token);
    else found.push([token]);
    isOpen = token.level > 0 || token.nesting === 1;
  }
  return found;
}

/** What is left to do on elements: code that can be copied, links that open elsewhere, math. */
function finished(block) {
  for (const pre of block.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /language-(\S+)/.exec(code?.className)?.[1] ?? "";
    const copy = iconButton("copy", "Copy the code", () => showCopied(copy, pre.textContent));
    pre.tabIndex = 0;
    const head = made("div", "code-head", made("span", "", language), copy);
    if (canPreview(language.toLowerCase(), pre.textContent)) copy.before(iconButton("eye", "Preview", () => preview(pre.textContent)));
    const frame = made("div", "code", head);
    pre.replaceWith(frame);
    frame.append(pre);
  }
  for (const link of block.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noreferrer";
  }
  for (const place of block.querySelectorAll(".math")) typeset(place);
  return block;
}

/** Copy a text, and let the button say so for a moment. */
export async function showCopied(button, text) {
  const isCopied = await copied(text);
  const other = iconButton(isCopied ? "done" : "close", isCopied ? "Copied" : "The browser does not allow it", () => {});
  button.hidden = true;
  button.after(other);
  setTimeout(() => {
    other.remove();
    button.hidden = false;
  }, 1500);
}

function coloured(code, language) {
  if (!highlighter.getLanguage(language) || code.length > LONGEST_COLOURED) return "";
  return highlighter.highlight(code, { language, ignoreIllegals: true }).value;
}

/** `style` attributes are against the page's policy. */
function alignByClass({ tokens }) {
  for (const token of tokens) {
    const style = token.attrGet?.("style");
    if (style) token.attrs = [["class", style.replace("text-align:", "")]];
  }
}

function placeForMath(source, isDisplay) {
  const name = isDisplay ? "div" : "span";
  return `<${name} class="math">${markdown.utils.escapeHtml(source)}</${name}>`;
}

async function typeset(place) {
  katex ??= loadKatex();
  const { render } = (await katex) ?? {};
  const source = place.textContent;
  try {
    const drawn = made("span");
    render(source, drawn, { displayMode: place.localName === "div", trust: false, maxExpand: 1000, maxSize: 50 });
    place.replaceChildren(drawn);
    place.dataset.source = source;
  } catch {
    // What KaTeX does not know, and what has not come to its end yet, is shown as it is written.
  }
}

async function loadKatex() {
  const style = made("link");
  style.rel = "stylesheet";
  style.href = "page/vendor/katex.css";
  document.head.append(style);
  await import("./vendor/katex.js").catch(() => null);
  return globalThis.katex;
}
