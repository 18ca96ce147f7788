// The settings of the page as values: read from the form, and put into it again.

const VALUES = ["length", "temperature", "top-p", "most", "seed", "system", "theme"]; // settings, by id
const CHECKS = ["fixed", "compare"];
const at = (id) => document.getElementById(id);

export const mode = () => document.querySelector("input[name=mode]:checked").value;

/** The settings as they stand; what a store keeps and a link carries. */
export function settingsNow() {
  return {
    mode: mode(),
    method: at("method").value,
    ...Object.fromEntries(VALUES.map((id) => [id, at(id).value])),
    ...Object.fromEntries(CHECKS.map((id) => [id, at(id).checked])),
  };
}

export function applySettings(found) {
  for (const id of VALUES.filter((name) => typeof found[name] === "string")) {
    at(id).value = found[id];
  }
  for (const id of CHECKS.filter((name) => typeof found[name] === "boolean")) {
    at(id).checked = found[id];
  }
  if (found.length) {
    at("length").dataset.chosen = found.length;
  }
  const radio = [...document.querySelectorAll("input[name=mode]")].find((each) => each.value === found.mode);
  if (radio) {
    radio.checked = true;
  }
}
