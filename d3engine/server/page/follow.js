// The page's end stays in sight while answers grow, until its reader scrolls up, and again when he is back at the end.

export class Follower {
  #follows = false;
  #last = 0;

  /** Of a page in which `element` grows. */
  constructor(element) {
    new ResizeObserver(() => this.#go()).observe(element);
    addEventListener("scroll", () => this.#see(), { passive: true });
  }

  /** From now on: something has been asked. */
  begin() {
    this.#follows = true;
    this.#go();
  }

  #go() {
    if (this.#follows) window.scrollTo(0, document.documentElement.scrollHeight);
  }

  #see() {
    const end = document.documentElement.scrollHeight - window.innerHeight;
    if (window.scrollY < this.#last) this.#follows = false;
    else if (window.scrollY >= end - 1) this.#follows = true;
    this.#last = window.scrollY;
  }
}
