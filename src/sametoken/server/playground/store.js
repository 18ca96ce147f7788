// What outlives a reload: settings and turns in the browser's store, and links that carry questions. Knows no elements.

const SETTINGS = "sametoken-settings";
const TURNS = "sametoken-turns";
const MOST_TURNS = 30;

export const settings = { load: () => read(SETTINGS) ?? {}, save: (value) => write(SETTINGS, value) };
export const kept = { load: () => read(TURNS) ?? [], save: (turns) => write(TURNS, turns.slice(-MOST_TURNS)) };

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    localStorage.removeItem(name); // full, or a window that keeps nothing: the page works without it
  }
}

/** A link that brings the same questions and settings to whoever opens it; with one seed the answers are the same too. */
export function linkOf(questions, chosen) {
  const bytes = new TextEncoder().encode(JSON.stringify({ questions, settings: chosen }));
  const spelled = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_");
  return `${location.href.split("#")[0]}#${spelled}`;
}

/** What a link brings, null if it brings nothing that can be read. */
export function fromLink(hash) {
  try {
    const plain = atob(hash.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
    const found = JSON.parse(new TextDecoder().decode(Uint8Array.from(plain, (sign) => sign.charCodeAt(0))));
    return found.questions.every((each) => typeof each === "string") && found.questions.length ? found : null;
  } catch {
    return null;
  }
}
