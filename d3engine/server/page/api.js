// What the page asks of the server it came from. Whatever goes wrong becomes an `ApiError` whose message is a sentence,
// which both pages tell in one way, with a form for the key where the server asks for one.

import { events } from "./sse.js";

const KEY = "d3engine-key";
const $ = (id) => document.getElementById(id);

export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    Object.assign(this, { status, param });
  }
}

/** The key is kept for as long as the tab lives, and nowhere else. */
const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function tell(problem) {
  $("problem").textContent = problem ?? "";
  $("problem").hidden = problem === null;
}

export function tellRefusal({ status, message }) {
  if (status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
  tell(status === 401 && !key.get() ? null : message);
}

/** Have `connect` try each key that is entered. */
export function takeKeys(connect) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set($("key").value.trim());
    $("key").value = "";
    connect();
  });
}

/** The JSON at a path below the page's own. */
export async function getJson(path) {
  const response = await ask(path, {});
  return await read(response);
}

/** Send a request that streams, and give each chunk of its answer as an object. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const content = JSON.stringify({ ...body, stream: true });
  const response = await ask(path, { method: "POST", headers, body: content, signal });
  let isWhole = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isWhole = true;
        break;
      }
      const chunk = parsed(data);
      if (chunk.error) throw errorOf(chunk, response.status);
      yield chunk;
    }
  } catch (error) {
    throw error instanceof ApiError || error.name === "AbortError" ? error : new ApiError(CUT);
  }
  if (!isWhole) throw new ApiError(CUT);
}

const CUT = "The connection to the server was lost before the answer was complete.";

async function ask(path, options) {
  const headers = { ...options.headers, ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw errorOf(await read(response).catch(() => ({})), response.status);
  return response;
}

async function read(response) {
  return parsed(await response.text());
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The server sent something that is not JSON.");
  }
}

function errorOf(body, status) {
  const said = body?.error;
  const message = typeof said?.message === "string" ? said.message : `The server answered with status ${status}.`;
  return new ApiError(message, { status, param: said?.param });
}
