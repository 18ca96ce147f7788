// The page: what the person asks becomes requests, answers become panes, and a server that went away is looked for.

import { Answer, difference } from "./answer.js";
import { Failure, getJson, key, stream } from "./api.js";
import { Pane, element, figures, following, race, replay, showEnd, showLive } from "./view.js";

const ALTERNATIVES = 5; // log-probabilities beside a token's own, where a rejected guess may be found
const AGAIN_MS = 1000;
const METHODS = {
  draft_target: "a smaller model",
  eagle: "a head that reads the target",
  eagle3: "a head that reads the target",
  medusa: "heads on the target",
  ngram: "what the text repeats",
  suffix: "what this and earlier texts repeat",
  auto: "all of them, chosen every step",
  none: "nothing, plain decoding",
};
const at = (id) => document.getElementById(id);
const turns = []; // {asked, answer}: the conversation that a chat continues
let usual = "none"; // the method of a request that names none
let going = null; // AbortController of what runs
let looking = false;

const mode = () => document.querySelector("input[name=mode]:checked").value;

function say(state, words) {
  at("status").dataset.state = state;
  at("status").textContent = words;
}

/** Asks the server what it is; true once that is known. */
async function connect() {
  try {
    const [models, { offers }] = [await getJson("v1/models"), await getJson("server_info")];
    at("model").textContent = models.data[0].id;
    usual = offers.method;
    at("length").max = offers.max_draft_len;
    at("length").value = at("length").dataset.chosen ?? offers.max_draft_len;
    offerMethods(offers.methods);
    document.querySelector("input[value=chat]").disabled = !offers.chat;
    if (!offers.chat) {
      document.querySelector("input[value=completion]").checked = true;
    }
    showSettings();
    say("ready", "ready");
    return true;
  } catch (error) {
    trouble(error);
    return false;
  }
}

/** Says what went wrong with the server as a whole, and looks for it again if it is gone. */
function trouble(error) {
  if (error.status === 401) {
    say("lost", "This server wants an API key: put it into the settings.");
    at("settings").open = true;
    at("locked").hidden = false;
    at("key").focus();
  } else if (error.lost) {
    look();
  } else {
    say("lost", error.message);
  }
}

async function look() {
  if (looking) {
    return;
  }
  looking = true;
  say("lost", "The server cannot be reached; trying again every second.");
  do {
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  } while (!(await getJson("health").then(() => true, () => false)));
  looking = false;
  await connect();
}

/** Fills the selector with what this server has; what was chosen stays chosen if it is still there. */
function offerMethods(methods) {
  const names = [...methods, ...(methods.length > 1 ? ["auto"] : []), "none"];
  const chosen = at("method").value;
  const choices = names.map((name) => new Option(METHODS[name] ? `${name}: ${METHODS[name]}` : name, name));
  at("method").replaceChildren(new Option(`the server's choice: ${usual}`, ""), ...choices);
  at("method").value = names.includes(chosen) ? chosen : "";
}

/** The method of the next request, whoever chose it. */
const method = () => at("method").value || usual;

function showSettings() {
  const plain = method() === "none";
  for (const id of ["length", "fixed", "compare"]) {
    at(id).disabled = plain;
  }
  at("no-draft").hidden = !plain || at("method").value !== "";
  at("length-said").textContent = at("length").value;
  at("temperature-said").textContent = Number(at("temperature").value).toFixed(1);
}

function bodyOf(asked, plain) {
  const chat = mode() === "chat";
  const said = turns.flatMap((turn) => [
    { role: "user", content: turn.asked },
    { role: "assistant", content: turn.answer.text },
  ]);
  return {
    ...(chat ? { messages: [...said, { role: "user", content: asked }] } : { prompt: asked }),
    ...(chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES }),
    stream: true,
    max_tokens: at("most").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    seed: at("seed").valueAsNumber,
    speculative: {
      report: true,
      enabled: !plain,
      ...(at("method").value && { method: at("method").value }),
      max_draft_len: at("length").valueAsNumber,
      ...(at("fixed").checked && { adaptive: false }),
    },
  };
}

/** Streams one answer into its pane; true if it came to its end. */
async function run(pane, path, body, signal) {
  const answer = (pane.answer = new Answer(performance.now()));
  try {
    for await (const event of stream(path, body, signal)) {
      const fresh = answer.take(event, performance.now());
      following(() => {
        pane.add(fresh);
        pane.figures.textContent = figures(answer);
      });
      showLive(answer);
    }
    return true;
  } catch (error) {
    if (error.name === "AbortError") {
      pane.fail("Stopped.");
    } else if (error instanceof Failure) {
      pane.fail(error.message);
      if (error.lost || error.status === 401) {
        trouble(error);
      }
    } else {
      throw error;
    }
    return false;
  }
}

/** One question: its answer, or with a comparison both; true if any of an answer came. */
async function ask(asked) {
  const turn = element("section", "turn");
  const panes = element("div", "panes");
  const chat = mode() === "chat";
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const { signal } = (going = new AbortController());
  const compare = at("compare").checked && method() !== "none";
  const bodies = compare ? [bodyOf(asked, false), bodyOf(asked, true)] : [bodyOf(asked, false)];
  const drafted = new Pane(method() === "none" ? "plain" : `speculative, ${method()}`, new Answer(0));
  const plain = new Pane("plain", new Answer(0));
  panes.append(drafted.root, ...(compare ? [plain.root] : []));
  turn.append(element("p", "asked", asked), panes);
  at("welcome").hidden = true;
  at("turns").append(turn);
  showEnd();
  // One after the other: two at once would slow each other. Plain comes second, so that it is plain decoding that finds
  // the prompt in the cache.
  let done = await run(drafted, path, bodies[0], signal);
  at("said").textContent = drafted.answer.text;
  if (done && compare) {
    done = await run(plain, path, bodies[1], signal);
    if (done) {
      await judge(turn, drafted, plain, signal);
    }
  }
  if (chat && drafted.answer.text && turn.isConnected) {
    turns.push({ asked, answer: drafted.answer });
  }
  return drafted.answer.tokens.length > 0;
}

/** Says whether two answers are equal and how much sooner one came, and shows both at their speeds. */
async function judge(turn, drafted, plain, signal) {
  const place = difference(drafted.answer, plain.answer);
  const [fast, slow] = [drafted.answer.seconds, plain.answer.seconds];
  const verdict = element("p", "verdict", place === -1
    ? `Speed-up ${(slow / fast).toFixed(2)}, and equal: all ${plain.answer.ids.length} tokens are the same.`
    : `Different from token ${place + 1} on. Drafts must never change a token; please report this.`);
  verdict.classList.toggle("different", place !== -1);
  verdict.setAttribute("role", "status");
  const note = element("span", "note");
  const again = element("button", "again", "Replay");
  const row = element("div", "row");
  row.append(again, note);
  following(() => turn.append(verdict, race([["speculative", fast], ["plain", slow]]), row));
  showLive(drafted.answer);
  const show = (ended) => replay([drafted, plain], ended, (words) => (note.textContent = words));
  again.addEventListener("click", () => show(new AbortController().signal));
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
    await show(signal);
  }
}

function busy(state) {
  at("send").disabled = state;
  at("stop").disabled = !state;
}

async function submit() {
  const asked = at("prompt").value;
  if (going || !asked.trim()) {
    return;
  }
  at("prompt").value = "";
  busy(true);
  try {
    if (!(await ask(asked)) && !at("prompt").value) {
      at("prompt").value = asked; // nothing came of it, so that it can be sent again
    }
  } finally {
    going = null;
    busy(false);
    at("prompt").focus();
  }
}

function reset() {
  going?.abort();
  turns.length = 0;
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  at("prompt").focus();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && going?.abort());
at("stop").addEventListener("click", () => going?.abort());
at("reset").addEventListener("click", reset);
at("length").addEventListener("input", () => {
  at("length").dataset.chosen = at("length").value;
  showSettings();
});
at("temperature").addEventListener("input", showSettings);
at("method").addEventListener("change", showSettings);
for (const suggestion of document.querySelectorAll(".suggestion")) {
  suggestion.addEventListener("click", () => {
    at("prompt").value = suggestion.textContent;
    submit();
  });
}
at("key").value = key.get();
at("locked").hidden = !key.get();
at("key").addEventListener("change", () => {
  key.set(at("key").value);
  connect();
});
at("settings").open = at("figures").open = matchMedia("(min-width: 52rem)").matches;
showSettings();
showLive(new Answer(0));
connect();
