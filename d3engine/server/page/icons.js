// Small line drawings for buttons, on a grid of 24.

const LINES = {
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  down: "M12 5v14M6 13l6 6 6-6",
  attach: "M8 12l6-6a3 3 0 0 1 4 4l-8 8a5 5 0 0 1-7-7l7-7",
  copy: "M9 9h10v11H9zM5 15V4h10",
  done: "M5 13l4 4L19 7",
  edit: "M4 20l1-5L16 4l4 4L9 19zM14 6l4 4",
  again: "M5 12a7 7 0 1 0 2-5M7 3v4h4",
  goOn: "M5 6l7 6-7 6zM13 6l7 6-7 6z",
  remove: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  earlier: "M14 6l-6 6 6 6",
  later: "M10 6l6 6-6 6",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  help: "M9 9a3 3 0 1 1 4 3c-1 .5-1 1-1 2M12 17.5v.5M12 3a9 9 0 1 0 .01 0z",
  layers: "M12 4l9 5-9 5-9-5zM4 14l8 5 8-5",
  columns: "M4 5h7v14H4zM14 5h6v14h-6z",
  sliders: "M4 8h8M16 8h4M14 6v4M4 16h3M11 16h9M9 14v4",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  expand: "M14 4h6v6M20 4l-7 7M10 20H4v-6M4 20l7-7",
  eye: "M2 12c3-5 6.5-7 10-7s7 2 10 7c-3 5-6.5 7-10 7s-7-2-10-7zM12 9a3 3 0 1 0 .01 0z",
  folder: "M3 6h6l2 2h10v11H3z",
  folderOpen: "M3 19V6h6l2 2h8v3M3 19l3-8h16l-3 8z",
  folderPlus: "M3 6h6l2 2h10v11H3zM12 11v5M9.5 13.5h5",
  pin: "M9 4h6l-.5 6 3.5 4H6l3.5-4zM12 14v7",
};

export function icon(name) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", LINES[name]);
  drawn.setAttribute("viewBox", "0 0 24 24");
  drawn.setAttribute("aria-hidden", "true");
  drawn.append(path);
  return drawn;
}

/** A button that sends no form, with a class and a text or children. */
export function button(kind, press, ...children) {
  const element = made("button", kind, ...children);
  element.type = "button";
  element.addEventListener("click", press);
  return element;
}

/** A button with an icon alone, which says in words what it does. */
export function iconButton(name, words, press) {
  const element = button("icon", press, icon(name));
  element.title = words;
  element.setAttribute("aria-label", words);
  return element;
}

/** Give the buttons of the page's own markup their icons. */
export function drawIcons() {
  for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
}

/** An element of a name, with a class and a text or children. */
export function made(name, kind = "", ...children) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.append(...children);
  return element;
}
