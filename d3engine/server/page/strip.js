// The map of layers by steps: a column for each token, its layers from the lowest at the bottom to the last at the top.

import { runs } from "./schedule.js";

const WIDEST = 8;
const HEIGHT = 72;

/** Draw on a canvas which layers ran at each step.
 *
 * `first` is the layer at which the window of skipped ones begins, or null. Columns get narrower when there are more
 * than fit; beyond a pixel each, several steps share a column, and the first of them is drawn.
 */
export function drawStrip(canvas, depths, { layers, first, scale }) {
  const { paddingLeft, paddingRight } = getComputedStyle(canvas.parentElement);
  const width = canvas.parentElement.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  const ratio = window.devicePixelRatio || 1;
  const column = Math.max(1, Math.min(WIDEST, Math.floor(width / Math.max(depths.length, 1))));
  const every = Math.max(1, Math.ceil((depths.length * column) / Math.max(width, 1)));
  const columns = Math.ceil(depths.length / every);
  const row = Math.max(1, Math.min(6, Math.floor(HEIGHT / layers)));
  size(canvas, Math.max(1, columns * column), layers * row, ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const skipped = getComputedStyle(canvas).color; // of a property that is light or dark, only this is resolved
  const [gapX, gapY] = [column > 3 ? 1 : 0, row > 2 ? 1 : 0];
  for (let x = 0; x < columns; x++) {
    const depth = depths[x * every];
    const ran = scale.colour(depth);
    for (let layer = 0; layer < layers; layer++) {
      pen.fillStyle = runs(layer, depth, layers, first) ? ran : skipped;
      pen.fillRect(x * column, (layers - 1 - layer) * row, column - gapX, row - gapY);
    }
  }
}

/** The colours of the scale from most to least: a canvas between two numbers. */
export function drawLegend(legend, scale) {
  legend.setAttribute("aria-label", `Colours go from ${scale.most} layers, dark, to ${scale.least}, light.`);
  legend.firstElementChild.textContent = `${scale.most} layers`;
  legend.lastElementChild.textContent = scale.least;
  const canvas = legend.querySelector("canvas");
  const ratio = window.devicePixelRatio || 1;
  size(canvas, 120, 12, ratio);
  const pen = canvas.getContext("2d");
  const steps = Math.max(1, scale.most - scale.least + 1);
  for (let i = 0; i < steps; i++) {
    pen.fillStyle = scale.colour(scale.most - i);
    const [from, to] = [i, i + 1].map((edge) => Math.round((edge * canvas.width) / steps));
    pen.fillRect(from, 0, to - from, canvas.height);
  }
}

function size(canvas, width, height, ratio) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}
