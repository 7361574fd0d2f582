// Server-sent events out of a response's body. A chunk of the network may end anywhere: in a line, between \r and \n,
// or inside a character.

/** The data of each event of a stream of bytes, as text. Comments and fields other than `data` are left out. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A \r at the end may be half of a line's end, so it waits for what follows.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "") continue;
        if (data.length) yield data.join("\n");
        data = [];
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
