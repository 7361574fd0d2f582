// What both pages say when the server refuses: the problem, and the form for a key where it asks for one.

import { key } from "./api.js";

const $ = (id) => document.getElementById(id);

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
