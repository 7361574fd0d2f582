// The clipboard, and files that the page makes and reads.

/** Put a text on the clipboard, also where a page without TLS may not use it by its newer name. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const MAX_FILE_BYTES = 2 ** 20;

/** A file as {name, text}; fails with a sentence where it is no text, or too long for a prompt. */
export async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is too large: a file has 1 MiB at most.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // What is no UTF-8 is no text.
  }
  throw new Error(`${file.name} is not a text file in UTF-8.`);
}
