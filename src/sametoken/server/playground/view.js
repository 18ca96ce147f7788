// Elements for answers: panes of tokens that can be asked about, the replay of two of them, figures and the chart.

import { quoted } from "./answer.js";

const SHOWN_SECONDS = 3; // a replay that would be over sooner is slowed down to this
const tip = document.getElementById("tip");
const scrollers = [document.getElementById("scroll"), document.scrollingElement]; // on a desk, on a phone
let pointed; // the token that `tip` is about, of all panes

export function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export class Pane {
  constructor(title, answer) {
    this.answer = answer;
    this.root = element("article", "pane");
    this.box = element("div", "tokens");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${title}: tokens; arrow keys move among them, Enter shows a forward`);
    this.figures = element("p", "figures");
    this.root.append(element("h3", "", title), this.box, this.figures);
    this.current = -1;
    this.opened = () => {}; // what a click on a token, or Enter, does with its index
    this.box.addEventListener("mouseover", (event) => this.#point(this.#index(event.target)));
    this.box.addEventListener("click", (event) => {
      const index = this.#index(event.target);
      this.#point(index);
      if (index >= 0) {
        this.opened(index);
      }
    });
    this.box.addEventListener("mouseleave", () => this.#point(-1));
    this.box.addEventListener("blur", () => this.#point(-1));
    this.box.addEventListener("keydown", (event) => this.#move(event));
  }

  add(tokens) {
    for (const token of tokens) {
      const text = this.box.childElementCount ? token.text : token.text.trimStart();
      const span = element("span", "token", token.end ? "⏎" : text);
      span.classList.toggle("drafted", token.drafted);
      span.classList.toggle("refused", token.rejected.length > 0);
      span.classList.toggle("end", token.end);
      this.#forward(token).append(span);
    }
  }

  /** Shows that the last token ends the answer, which is known after it. */
  showEnd() {
    const span = this.#spans.at(-1);
    span.textContent = "⏎";
    span.classList.add("end");
  }

  /** The element of a token's forward, at the end of the pane. */
  #forward(token) {
    const last = this.box.lastElementChild;
    if (last?.dataset.forward === `${token.forward}`) {
      return last;
    }
    const made = element("span", "forward");
    made.dataset.forward = token.forward;
    this.box.append(made);
    return made;
  }

  get #spans() {
    return [...this.box.querySelectorAll(".token")];
  }

  /** Shows the first tokens only, with the room of the others kept. */
  showFirst(count) {
    this.#spans.forEach((span, i) => span.classList.toggle("later", i >= count));
    for (const forward of this.box.children) {
      forward.classList.toggle("later", forward.firstElementChild.classList.contains("later"));
    }
  }

  fail(words) {
    const told = element("p", "error", words);
    told.setAttribute("role", "alert");
    following(() => this.root.append(told));
  }

  #index(target) {
    return this.#spans.indexOf(target);
  }

  #move(event) {
    const last = this.#spans.length - 1;
    const to = { ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.#point(Math.max(0, Math.min(last, to)));
      this.#spans[this.current]?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" && this.current >= 0) {
      this.opened(this.current);
    } else if (event.key === "Escape") {
      this.#point(-1);
    }
  }

  #point(index) {
    const span = this.#spans[index];
    pointed?.classList.remove("current");
    pointed = span;
    this.current = index;
    tip.hidden = !span;
    if (!span) {
      return;
    }
    span.classList.add("current");
    tip.textContent = explain(this.answer.tokens[index]);
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 4))}px`;
    const above = at.top - tip.offsetHeight - 6;
    tip.style.top = `${above > 0 ? above : at.bottom + 6}px`;
  }
}

/** Makes a change of what scrolls, and goes on showing its end if that is what was shown. */
export function following(change) {
  const ended = scrollers.filter((each) => each.scrollHeight - each.scrollTop - each.clientHeight < 40);
  change();
  ended.forEach((each) => (each.scrollTop = each.scrollHeight));
}

export function showEnd() {
  scrollers.forEach((each) => (each.scrollTop = each.scrollHeight));
}

/** A bar for each answer, as long as its time, cut into its forwards; the first is in the colour of drafts. */
export function timeline(answers) {
  const longest = Math.max(...answers.map(([, answer]) => answer.seconds));
  const root = element("div", "timeline");
  answers.forEach(([name, answer], i) => {
    const bar = element("span", i ? "bar" : "bar fast");
    bar.style.width = `${(100 * answer.seconds) / longest}%`;
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${name}: ${answer.forwardCount} forwards in ${answer.seconds.toFixed(2)} s`);
    for (const step of answer.steps) {
      const part = element("span", "", step.tokens > 1 ? step.tokens : "");
      part.style.flexGrow = 1000 * step.seconds; // below 1 in all they would not fill the bar
      part.title = `forward ${step.forward + 1}: ${step.tokens} token${step.tokens > 1 ? "s" : ""} in ${(1000 * step.seconds).toFixed(0)} ms`;
      bar.append(part);
    }
    root.append(element("span", "", name), bar, element("span", "", `${answer.seconds.toFixed(2)} s`));
  });
  return root;
}

function explain(token) {
  const lines = [`${quoted(token)}: ${token.drafted ? `drafted at place ${token.place}, accepted` : "the target's own token"}`];
  if (token.probability !== undefined) {
    lines.push(`probability ${percent(token.probability)}`);
  }
  for (const guess of token.rejected) {
    const chance = guess.probability === undefined ? "" : ` (probability ${percent(guess.probability)})`;
    lines.push(`rejected at place ${token.place}: ${JSON.stringify(guess.text)}${chance}`);
  }
  return lines.join("\n");
}

export function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/** Shows panes again, together, at the speeds that they had; short ones slower, which `say` is told. */
export async function replay(panes, signal, say) {
  const longest = Math.max(...panes.map((pane) => pane.answer.seconds));
  const slowed = Math.max(1, SHOWN_SECONDS / longest);
  say(slowed > 1 ? `Both again, ${slowed.toFixed(0)} times slower than they were.` : "Both again, as fast as they were.");
  const begin = performance.now();
  let seconds = 0;
  while (seconds < longest && !signal.aborted) {
    seconds = (performance.now() - begin) / 1000 / slowed;
    panes.forEach((pane) => pane.showFirst(pane.answer.tokensAt(seconds)));
    await new Promise(requestAnimationFrame);
  }
  panes.forEach((pane) => pane.showFirst(Infinity));
}

export function figures(answer) {
  return `${answer.tokens.length} tokens in ${answer.forwardCount} forwards: ${answer.acceptanceLength.toFixed(2)} for each\n` +
    `${answer.seconds.toFixed(2)} s, ${answer.speed.toFixed(0)} tokens/s`;
}

/** The live numbers beside the conversation. */
export function showLive(answer) {
  const said = {
    acceptance: answer.tokens.length ? answer.acceptanceLength.toFixed(2) : "-",
    speed: answer.speed ? answer.speed.toFixed(0) : "-",
    count: answer.tokens.length || "-",
    first: answer.first === undefined ? "-" : `${(1000 * answer.first).toFixed(0)} ms`,
  };
  for (const [id, text] of Object.entries(said)) {
    document.getElementById(id).textContent = text;
  }
  drawChart(document.getElementById("chart"), answer);
}

function drawChart(chart, answer) {
  const rates = answer.tried.map((tried, i) => answer.accepted[i] / tried);
  const words = rates.map((rate, i) => `place ${i + 1}: ${answer.accepted[i]} of ${answer.tried[i]}`);
  chart.setAttribute("aria-label", words.join(", ") || "no draft yet");
  chart.replaceChildren(shape("line", { x1: 0, x2: 240, y1: 92, y2: 92 }));
  const width = 240 / Math.max(4, rates.length);
  rates.forEach((rate, i) => {
    const middle = (i + 0.5) * width;
    const height = 72 * rate;
    chart.append(
      shape("rect", { x: middle - 0.35 * width, y: 92 - height, width: 0.7 * width, height }),
      shape("text", { x: middle, y: 88 - height }, percent(rate)),
      shape("text", { x: middle, y: 105 }, `${i + 1}`),
    );
  });
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS(document.getElementById("chart").namespaceURI, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
}
