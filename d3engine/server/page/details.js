// What is known of one token, shown beside it while it is pointed at or has the focus.

import { made } from "./icons.js";

const card = document.getElementById("details");

/** Show `rows` of [name, value] and `others` of [text, logprob] beside an element. */
export function showDetails(beside, heading, rows, others) {
  card.replaceChildren(
    made("strong", "", heading),
    ...rows.map(([name, value]) => made("div", "", `${name}: ${value}`)),
    ...(others.length ? [made("div", "hint", "Alternatives:")] : []),
    ...others.map(([text, logprob]) => bar(text, logprob)),
  );
  card.hidden = false;
  const place = beside.getClientRects()[0] ?? beside.getBoundingClientRect();
  const left = Math.min(place.left, document.documentElement.clientWidth - card.offsetWidth - 8);
  const below = place.bottom + 6;
  const fits = below + card.offsetHeight < window.innerHeight;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${fits ? below : Math.max(8, place.top - card.offsetHeight - 6)}px`;
}

export function hideDetails() {
  card.hidden = true;
}

/** Letters that can be seen: spaces and line ends are drawn as signs. */
export function visible(text) {
  return text.replaceAll(" ", "\u2423").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5") || "(no text)";
}

export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 && value < 100 ? "> 99.9 %" : value < 0.05 ? "< 0.1 %" : `${value.toFixed(1)} %`;
}

function bar(text, logprob) {
  const share = made("i");
  share.style.width = `${100 * Math.exp(logprob)}%`;
  return made("div", "alternative", made("code", "", visible(text)), made("span", "meter", share), made("span", "", percent(logprob)));
}
