// HTML and SVG that a model has written, in a frame of another origin: no script of it runs, and it loads nothing.

import { made } from "./icons.js";

const dialog = document.getElementById("preview");
const place = document.getElementById("preview-place");

/** Whether a block of code can be shown, by its language. */
export const canPreview = (language, source) => ["html", "svg"].includes(language) || (language === "xml" && /<svg[\s>]/.test(source));

export function preview(source) {
  const frame = made("iframe");
  frame.title = "Preview";
  frame.setAttribute("sandbox", "allow-scripts"); // for the frame's own, which cleans what it is sent
  frame.src = "page/preview.html";
  frame.addEventListener("load", () => frame.contentWindow.postMessage(source, "*"));
  place.replaceChildren(frame);
  dialog.showModal();
}

dialog.addEventListener("close", () => place.replaceChildren());
addEventListener("message", ({ source, data }) => {
  if (data === "close" && source === place.firstChild?.contentWindow) dialog.close();
});
