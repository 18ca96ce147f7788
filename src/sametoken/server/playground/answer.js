// One answer as it arrives: its tokens with their origins, and what there is to count. Knows no elements and no network.

const PARTIAL = /^bytes:(?:\\x[0-9a-f]{2})+$/; // how the server spells a part of a character

export class Answer {
  constructor(started) {
    this.started = started; // milliseconds, as all times that are given to it
    this.text = "";
    this.ids = [];
    this.tokens = []; // {text, drafted, place, forward, probability, rejected: [{text, probability}], end}
    this.trees = []; // by forward: {drafter, guesses: [text, the guess that it follows, probability, accepted, who said it]}
    this.arrivals = []; // [seconds since the start, tokens until then], for one forward or more
    this.forwards = 0; // those that ended with the target's own token, as all do but one that an end cut short
    this.tried = []; // by place in the draft, how many guesses the target came to
    this.accepted = []; // and how many of them came true
    this.stats = null;
    this.run = 0; // accepted guesses since the target's last own token
    this.decoder = new TextDecoder();
  }

  /** Takes an event of a stream; returns the tokens that it brings. */
  take(event, now) {
    const choice = event.choices[0];
    const report = choice?.speculative;
    if (!report) {
      return [];
    }
    this.text += choice.text ?? choice.delta.content ?? "";
    const scores = scored(choice.logprobs);
    const fresh = report.tokens.map((spelled, i) =>
      this.#token(spelled, report.origins[i] === "drafted", report.rejected[i], scores[i]),
    );
    this.ids.push(...report.token_ids);
    this.tokens.push(...fresh);
    this.trees.push(...(report.steps ?? []).map(compact));
    if (fresh.length) {
      this.arrivals.push([(now - this.started) / 1000, this.tokens.length]);
    }
    if (choice.finish_reason === "stop" && choice.stop_reason === null && this.tokens.length) {
      this.tokens.at(-1).end = true; // which an event of its own says
    }
    this.stats = report.stats ?? this.stats;
    return fresh;
  }

  #token(spelled, drafted, rejected, score) {
    const place = this.run + 1;
    if (drafted || rejected.length) {
      this.tried[place - 1] = (this.tried[place - 1] ?? 0) + 1;
      this.accepted[place - 1] = (this.accepted[place - 1] ?? 0) + drafted;
    }
    this.run = drafted ? place : 0;
    this.forwards += !drafted;
    return {
      text: this.decoder.decode(bytes(spelled), { stream: true }),
      drafted,
      place,
      forward: this.forwards - !drafted,
      probability: score?.probability,
      rejected: rejected.map((text) => ({ text, probability: score?.others.get(text) })),
      end: false,
    };
  }

  get seconds() {
    return this.arrivals.at(-1)?.[0] ?? 0;
  }

  get first() {
    return this.arrivals[0]?.[0];
  }

  get speed() {
    return this.seconds ? this.tokens.length / this.seconds : 0;
  }

  /** Forwards of the target so far. */
  get forwardCount() {
    return this.forwards + (this.run > 0);
  }

  /** Tokens per forward of the target. */
  get acceptanceLength() {
    return this.forwardCount ? this.tokens.length / this.forwardCount : 0;
  }

  /** What each forward brought, and how long it took: forwards that arrived together share their time. */
  get steps() {
    const steps = [];
    let [done, before] = [0, 0];
    for (const [seconds, count] of this.arrivals) {
      const numbers = this.tokens.slice(done, count).map((token) => token.forward);
      const forwards = [...new Set(numbers)];
      for (const forward of forwards) {
        const tokens = numbers.filter((each) => each === forward).length;
        steps.push({ forward, tokens, seconds: (seconds - before) / forwards.length });
      }
      [done, before] = [count, seconds];
    }
    return steps;
  }

  /** The guesses of a forward as a tree of {text, kind, chance, said, children}, below the token before the forward. */
  tree(number) {
    const tokens = this.tokens.filter((token) => token.forward === number);
    const { drafter, guesses } = this.trees[number] ?? known(tokens);
    const drafted = tokens.filter((token) => token.drafted);
    const before = this.tokens[this.tokens.indexOf(tokens[0]) - 1];
    const root = { text: before ? quoted(before) : "the prompt", kind: "root", children: [] };
    const nodes = guesses.map(([text, , chance, taken, said]) => (
      { text: JSON.stringify(text), kind: taken ? "taken" : "rejected", chance, said, children: [] }
    ));
    const path = nodes.filter((node) => node.kind === "taken");
    path.forEach((node, i) => (node.text = quoted(drafted[i])));
    guesses.forEach(([, parent], i) => (nodes[parent] ?? root).children.push(nodes[i]));
    const own = tokens.at(-1);
    if (!own.drafted) {
      const last = path.at(-1) ?? root;
      last.children.push({ text: quoted(own), kind: "own", chance: own.probability, children: [] });
    }
    const order = (a, b) => (a.kind === "rejected") - (b.kind === "rejected") || b.chance - a.chance;
    [root, ...nodes].forEach((node) => node.children.sort(order)); // the path on top, then the most probable
    return { drafter, guesses: guesses.length, brought: tokens.length, root };
  }

  /** What a store keeps of an answer, and the answer again. */
  get kept() {
    const { text, ids, tokens, trees, arrivals, forwards, tried, accepted, run } = this;
    return { text, ids, tokens, trees, arrivals, forwards, tried, accepted, run };
  }

  static from(kept) {
    return Object.assign(new Answer(0), kept);
  }

  /** Tokens that had arrived after so many seconds. */
  tokensAt(seconds) {
    return this.arrivals.findLast(([at]) => at <= seconds)?.[1] ?? 0;
  }
}

/** The first place at which two answers differ, -1 if they are the same. */
export function difference(one, other) {
  const place = one.ids.findIndex((id, i) => id !== other.ids[i]);
  return place === -1 && one.ids.length !== other.ids.length ? one.ids.length : place;
}

/** A step of a report in a form that takes little room in a store. */
function compact({ tokens, parents, probabilities, accepted, drafters }) {
  const short = (probability) => Math.round(1e4 * probability) / 1e4;
  const names = [...new Set(drafters.flat())];
  const said = (i) => (names.length > 1 ? [drafters[i].join(", ")] : []); // one drafter said them all
  const guess = (text, i) => [text, parents[i], short(probabilities[i]), accepted[i], ...said(i)];
  return { drafter: names.join(" and "), guesses: tokens.map(guess) };
}

/** What tokens alone tell of their forward, for an answer that was stored without its trees. */
function known(tokens) {
  const drafted = tokens.filter((token) => token.drafted);
  const taken = drafted.map((token, i) => [token.text, i - 1, token.probability, true]);
  const refused = tokens.at(-1).rejected.map((guess) => [guess.text, taken.length - 1, guess.probability, false]);
  return { drafter: "the draft", guesses: [...taken, ...refused] };
}

export function quoted(token) {
  return token.end ? "end of the answer" : JSON.stringify(token.text);
}

function bytes(spelled) {
  if (!PARTIAL.test(spelled)) {
    return new TextEncoder().encode(spelled);
  }
  return Uint8Array.from(spelled.match(/[0-9a-f]{2}(?=\\|$)/g), (digits) => parseInt(digits, 16));
}

/** Probabilities of tokens and of their alternatives by text, from either form of the API. */
function scored(logprobs) {
  if (!logprobs) {
    return [];
  }
  if (logprobs.content) {
    return logprobs.content.map((item) => ({
      probability: Math.exp(item.logprob),
      others: new Map(item.top_logprobs.map((other) => [other.token, Math.exp(other.logprob)])),
    }));
  }
  return logprobs.token_logprobs.map((logprob, i) => ({
    probability: Math.exp(logprob),
    others: new Map(Object.entries(logprobs.top_logprobs[i]).map(([text, other]) => [text, Math.exp(other)])),
  }));
}
