// Depth in a chat: a thin line under each word, in the colour of the layers that its token ran.
//
// Lines are custom highlights: ranges of the text as it is, whatever Markdown has made of it. Rendered characters are
// found again in the source one after the other; what Markdown has left out of it is passed over.

const FURTHEST = 400;

export const canUnderline = "highlights" in CSS;

export class Underlines {
  #ranges = new Map(); // element -> [[depth, range], ...]
  #depths = new WeakMap(); // text node -> the depth of each of its characters

  /** Underline an answer; `depths` has [offset, depth] where the depth changes. */
  draw(element, content, depths) {
    this.erase(element);
    const drawn = [];
    for (const [node, found] of depthsOfNodes(element, Array.from(content), depths)) {
      this.#depths.set(node, found);
      for (const [depth, from, to] of runsOf(found, node.data)) {
        const range = new StaticRange({ startContainer: node, startOffset: from, endContainer: node, endOffset: to });
        highlight(depth).add(range);
        drawn.push([depth, range]);
      }
    }
    this.#ranges.set(element, drawn);
  }

  erase(element) {
    for (const [depth, range] of this.#ranges.get(element) ?? []) highlight(depth).delete(range);
    this.#ranges.delete(element);
  }

  eraseAll() {
    for (const element of [...this.#ranges.keys()]) this.erase(element);
  }

  /** What is at a point of the window: {depth, range}, or null. */
  at(x, y) {
    const place = document.caretPositionFromPoint?.(x, y);
    const depth = this.#depths.get(place?.offsetNode)?.[place.offset];
    if (depth === undefined) return null;
    const range = document.createRange();
    range.setStart(place.offsetNode, place.offset);
    range.setEnd(place.offsetNode, place.offset + 1);
    return { depth, range };
  }
}

function highlight(depth) {
  const name = `depth-${depth}`;
  if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
  return CSS.highlights.get(name);
}

/** [text node, the depth of each of its UTF-16 units] for each text of the answer itself. */
function* depthsOfNodes(element, characters, depths) {
  const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, ({ parentElement }) =>
    parentElement.closest(".code-head, .math") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT,
  );
  let position = 0;
  let run = 0;
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const found = [];
    for (const character of node.data) {
      const place = character.trim() ? characters.indexOf(character, position) : -1;
      const isFound = place >= 0 && place < position + FURTHEST;
      if (isFound) {
        position = place + 1;
        while (run + 1 < depths.length && depths[run + 1][0] <= place) run += 1;
      }
      const isKnown = isFound && depths.length > 0 && depths[run][0] <= place;
      for (let unit = 0; unit < character.length; unit++) found.push(isKnown ? depths[run][1] : undefined);
    }
    yield [node, found];
  }
}

/** [depth, from, to] for neighbours of the same depth on a line; spaces between them are underlined as well. */
function* runsOf(depths, text) {
  let [depth, from, to] = [undefined, 0, 0];
  for (const [place, next] of depths.entries()) {
    if (next === undefined && text[place] !== "\n") continue;
    if (next !== depth) {
      if (depth !== undefined) yield [depth, from, to];
      [depth, from] = [next, place];
    }
    to = place + 1;
  }
  if (depth !== undefined) yield [depth, from, to];
}
