// One question on the page: its panes, the times of its answers, the verdict about them, and a forward on demand.

import { Answer, difference } from "./answer.js";
import { stepPanel } from "./step.js";
import { Pane, element, following, replay, showEnd, showLive, timeline } from "./view.js";

const at = (id) => document.getElementById(id);

/** The elements of one question: what was asked, a line for the verdict, and its panes. */
export function showTurn(asked, titles) {
  const root = element("section", "turn");
  const verdict = element("p", "verdict", titles.length > 1 ? "Two answers: with the draft, then without it." : "");
  verdict.setAttribute("role", "status");
  const panes = titles.map((title) => new Pane(title, new Answer(0)));
  const box = element("div", "panes");
  box.append(...panes.map((pane) => pane.root));
  const detail = element("div", "detail");
  for (const pane of panes) {
    pane.opened = (index) => {
      detail.replaceChildren(stepPanel(pane.answer, index));
      detail.scrollIntoView({ block: "nearest" });
    };
  }
  root.append(element("p", "asked", asked), ...(titles.length > 1 ? [verdict] : []), box, detail);
  at("welcome").hidden = true;
  at("turns").append(root);
  showEnd();
  return { root, verdict, panes, detail };
}

/** Draws the times of a turn's answers; with two of them the verdict too, and a replay of both at their speeds. */
export async function finish({ root, verdict, panes, detail }, { drafted, plain }, signal) {
  const answers = [drafted, plain].filter((each) => each !== null);
  const bars = timeline(answers.map(({ title, answer }) => [title.replace(/,.*/, ""), answer]));
  following(() => root.insertBefore(bars, detail));
  showLive(drafted.answer);
  if (!plain) {
    return;
  }
  judge(verdict, drafted.answer, plain.answer);
  const note = element("span", "note");
  const again = element("button", "again", "Replay");
  const row = element("div", "row");
  row.append(again, note);
  following(() => root.insertBefore(row, detail));
  const show = (ended) => replay(panes, ended, (words) => (note.textContent = words));
  again.addEventListener("click", () => show(new AbortController().signal));
  if (signal && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
    await show(signal);
  }
}

/** Says whether two answers are equal, and how much sooner one came: a gain, a loss, or neither. */
export function judge(verdict, drafted, plain) {
  const place = difference(drafted, plain);
  const ratio = (plain.seconds / drafted.seconds).toFixed(2);
  const speed = ratio > 1 ? `Speed-up ${ratio}.` : ratio < 1
    ? `Slower: ${ratio} of the speed of plain decoding.` : "As fast as plain decoding.";
  verdict.textContent = place === -1 ? `${speed} The text is equal: all ${plain.ids.length} tokens are the same.`
    : `Different from token ${place + 1} on. Drafts must never change a token; please report this.`;
  verdict.dataset.kind = place !== -1 ? "different" : ratio > 1 ? "faster" : "slower";
}
