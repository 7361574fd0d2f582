// Server-sent events out of a response's body. A chunk of the network may end anywhere: in a line, between \r and \n,
// or inside a character.

/** The data of each event of a stream of bytes, as text. Comments and fields other than `data` are left out. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      yield* parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Takes text as it comes and gives the events that are complete. */
export class EventParser {
  #rest = "";
  #data = [];

  *push(text) {
    this.#rest += text;
    // A \r at the end may be half of a line's end, so it waits for what follows.
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) yield this.#data.join("\n");
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}
