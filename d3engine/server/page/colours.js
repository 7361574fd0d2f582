// The colours of depth, those of the engine's terminal and pictures: viridis without its ends, dark for many layers and
// light for few, with black or white letters, whichever reads better.

export const RAMP = ["#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962"];

const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

/** sRGB parts at a position of the ramp: 0 is deep, 1 is shallow. */
export function ramp(position) {
  const place = position * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const [first, second] = [parts(RAMP[low]), parts(RAMP[low + 1])];
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
  most = 1;
  least = 1;

  constructor() {
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, this.#sheet];
  }

  set(most, least) {
    if (most === this.most && least === this.least) return false;
    [this.most, this.least] = [most, least];
    const rules = [];
    for (let depth = 0; depth <= most; depth++) {
      rules.push(`.depth-${depth} { background: ${this.colour(depth)}; color: ${lettersOn(this.#parts(depth))}; }`);
    }
    this.#sheet.replaceSync(rules.join("\n"));
    return true;
  }

  colour(depth) {
    return `rgb(${this.#parts(depth).join(" ")})`;
  }

  #parts(depth) {
    const range = this.most - this.least;
    return ramp(range > 0 ? Math.min(Math.max((this.most - depth) / range, 0), 1) : 0);
  }
}
