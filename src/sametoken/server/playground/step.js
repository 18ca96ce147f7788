// One forward of the target, drawn: the guesses at each place, their chances, and the path that the target took.

import { element, percent, quoted } from "./view.js";

/** A panel about the forward that brought token `index`; places stand side by side, guesses one below another. */
export function stepPanel(answer, index) {
  const number = answer.tokens[index].forward;
  const tokens = answer.tokens.filter((token) => token.forward === number);
  const root = element("section", "step");
  root.setAttribute("aria-label", `forward ${number + 1}`);
  const words = tokens.length === 1 ? "1 token" : `${tokens.length} tokens`;
  root.append(element("h4", "", `Forward ${number + 1} of ${answer.forwardCount} brought ${words}`));
  const places = element("ol", "places");
  for (const token of tokens) {
    const place = element("li", "");
    const guesses = [{ text: quoted(token), kind: token.drafted ? "taken" : "own", chance: token.probability }];
    guesses.push(...token.rejected.map((guess) => ({
      text: JSON.stringify(guess.text), kind: "rejected", chance: guess.probability,
    })));
    place.append(...guesses.map(node));
    places.append(place);
  }
  const note = "Each column is a place. Green: guessed by the draft and drawn by the target. Outlined: the target's own " +
    "token, which ends the forward. Dotted: a guess that the target did not draw. The number is the target's probability.";
  root.append(places, element("p", "note", note));
  return root;
}

function node({ text, kind, chance }) {
  const made = element("span", `node ${kind}`, text);
  if (chance !== undefined) {
    made.append(element("small", "", percent(chance)));
  }
  return made;
}
