// Light or dark: as the system has it, unless a person has chosen for this page.

import { kept } from "./store.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const changed = new EventTarget();

export const theme = {
  get chosen() {
    return kept.get("theme", "system");
  },
  get isDark() {
    return this.chosen === "system" ? system.matches : this.chosen === "dark";
  },
  choose(name) {
    kept.set("theme", name);
    apply();
  },
  /** Call `act` whenever colours may have changed. */
  watch: (act) => changed.addEventListener("change", act),
};

function apply() {
  document.documentElement.dataset.theme = theme.chosen;
  changed.dispatchEvent(new Event("change"));
}

system.addEventListener("change", apply);
addEventListener("storage", apply); // another tab has chosen
apply();
