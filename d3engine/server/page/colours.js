// The colours of depth, those of the engine's terminal and pictures: viridis without its ends, dark for many layers and
// light for few, with black or white letters, whichever reads better.

import { theme } from "./theme.js";

export const RAMP = ["#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962"];

/** For a dark ground, where the deep end of the other is lost and looks like a skipped layer: viridis from further up.
 * All of it has a contrast of 3 or more, as WCAG 2 counts, to the ground and to the cells of skipped layers. */
export const RAMP_ON_DARK = ["#24868e", "#1e9c89", "#2ab07f", "#50c46a", "#81d34d", "#bddf26"];

const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

/** sRGB parts at a position of a ramp: 0 is deep, 1 is shallow. */
function ramp(position, colours) {
  const place = position * (colours.length - 1);
  const low = Math.min(Math.floor(place), colours.length - 2);
  const [first, second] = [parts(colours[low]), parts(colours[low + 1])];
  return first.map((a, i) => Math.round(a + (second[i] - a) * (place - low)));
}

function lettersOn(colour) {
  const linear = colour.map((part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff";
}

/** One scale for everything on the page, from the model's layers down to the fewest that any policy shown runs. */
export class DepthScale {
  #sheet = new CSSStyleSheet();
  #ramp = RAMP;
  most = 1;
  least = 1;

  constructor() {
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, this.#sheet];
  }

  set(most, least) {
    const onGround = theme.isDark ? RAMP_ON_DARK : RAMP;
    if (most === this.most && least === this.least && onGround === this.#ramp) return;
    [this.most, this.least, this.#ramp] = [most, least, onGround];
    const rules = [];
    for (let depth = 0; depth <= most; depth++) {
      const colour = this.colour(depth);
      rules.push(`.depth-${depth} { background: ${colour}; color: ${lettersOn(this.#parts(depth))}; }`);
      rules.push(`::highlight(depth-${depth}) { text-decoration: underline 2px ${colour}; text-underline-offset: 4px; }`);
    }
    this.#sheet.replaceSync(rules.join("\n"));
  }

  colour(depth) {
    return `rgb(${this.#parts(depth).join(" ")})`;
  }

  #parts(depth) {
    const range = this.most - this.least;
    return ramp(range > 0 ? Math.min(Math.max((this.most - depth) / range, 0), 1) : 0, this.#ramp);
  }
}
