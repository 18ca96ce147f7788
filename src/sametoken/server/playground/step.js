// One forward of the target, drawn as a tree: the guesses at each place, their chances, and the path that the target took.

import { element, percent } from "./view.js";

const SAID = { taken: "accepted guess: ", own: "the target's own token: ", rejected: "rejected guess: ", root: "after: " };
const NOTE = "From left to right, place by place. Green: guesses that the target drew too. Dotted: guesses that it did not draw. " +
  "Bold: the target's own token, which ends the forward. The numbers are the target's probabilities. " +
  "Where several drafters guessed, each guess names who said it.";

/** A panel about the forward that brought token `index`. */
export function stepPanel(answer, index) {
  const number = answer.tokens[index].forward;
  const { drafter, guesses, brought, root } = answer.tree(number);
  const panel = element("section", "step");
  panel.setAttribute("aria-label", `forward ${number + 1}`);
  const drafted = guesses ? `; ${drafter} had guessed ${counted(guesses)}` : "; nothing was guessed";
  const title = `Forward ${number + 1} of ${answer.forwardCount} brought ${counted(brought)}${drafted}`;
  const tree = element("ul", "tree");
  tree.tabIndex = 0; // a wide one scrolls, also for who has no mouse
  tree.setAttribute("aria-label", "guesses, place by place");
  tree.append(branch(root));
  panel.append(element("h4", "", title), tree, element("p", "note", NOTE));
  return panel;
}

function counted(number) {
  return number === 1 ? "1 token" : `${number} tokens`;
}

function branch({ text, kind, chance, said, children }) {
  const item = element("li", kind === "rejected" ? "" : "path");
  const box = element("span", `node ${kind}`);
  box.append(element("span", "quiet", SAID[kind]), text);
  if (chance !== undefined) {
    box.append(element("small", "", percent(chance)));
  }
  if (said) {
    box.append(element("small", "said", said));
  }
  item.append(box);
  if (children.length) {
    const list = element("ul", "");
    list.append(...children.map(branch));
    item.append(list);
  }
  return item;
}
