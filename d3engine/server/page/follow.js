// The page's end stays in sight while answers grow, until its reader scrolls up, and again when he is back at the end.

export class Follower {
  #follows = false;
  #last = 0;
  #height = 0; // where the page has become shorter, the browser has scrolled, not the reader

  /** Of a page in which `element` grows; `told` is called with whether the end is in sight, or nearly. */
  constructor(element, told = () => {}) {
    this.told = told;
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
    this.#tell();
  }

  #see() {
    const height = document.documentElement.scrollHeight;
    if (window.scrollY >= height - window.innerHeight - 1) this.#follows = true;
    else if (window.scrollY < this.#last && height >= this.#height) this.#follows = false;
    [this.#last, this.#height] = [window.scrollY, height];
    this.#tell();
  }

  #tell() {
    this.told(window.scrollY >= document.documentElement.scrollHeight - 1.3 * window.innerHeight);
  }
}
