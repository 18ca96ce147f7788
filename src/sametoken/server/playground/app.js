// The page: what the person asks becomes requests, answers become panes, and a server that went away is looked for.

import { Answer } from "./answer.js";
import { Failure, getJson, key, stream } from "./api.js";
import { applySettings, mode, settingsNow } from "./form.js";
import { fromLink, kept, linkOf, settings } from "./store.js";
import { finish, showTurn } from "./turn.js";
import { element, figures, following, showEnd, showLive } from "./view.js";

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
const turns = []; // {asked, chat, drafted: {title, answer}, plain: null or the same}: what was asked, oldest first
const chosen = settings.load(); // of the last visit
let usual = "none"; // the method of a request that names none
let going = null; // AbortController of what runs
let looking = false;

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
    offerMethods(offers.methods, chosen.method);
    document.querySelector("input[value=chat]").disabled = !offers.chat;
    if (!offers.chat) {
      document.querySelector("input[value=completion]").checked = true;
    }
    showSettings();
    sayReady();
    return true;
  } catch (error) {
    trouble(error);
    return false;
  }
}

function sayReady() {
  const drafts = usual !== "none";
  say(drafts ? "ready" : "plain", drafts ? "ready" : "ready, decodes without drafts");
}

/** Says what went wrong with the server as a whole, and looks for it again if it is gone. */
function trouble(error) {
  if (error.status === 401) {
    say(key.get() ? "refused" : "locked", key.get()
      ? "The server refused this API key. Correct it in the settings."
      : "This server needs an API key. Enter it in the settings.");
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
function offerMethods(methods, before) {
  const names = [...methods, ...(methods.length > 1 ? ["auto"] : []), "none"];
  const selected = at("method").value || before;
  const choices = names.map((name) => new Option(METHODS[name] ? `${name}: ${METHODS[name]}` : name, name));
  at("method").replaceChildren(new Option(`the server's choice: ${usual}`, ""), ...choices);
  at("method").value = names.includes(selected) ? selected : "";
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
  at("top-p-said").textContent = Number(at("top-p").value).toFixed(2);
  document.documentElement.dataset.theme = at("theme").value;
}

function bodyOf(asked, plain) {
  const chat = mode() === "chat";
  const system = at("system").value.trim();
  const said = turns.filter((turn) => turn.chat && turn.drafted.answer.text).flatMap((turn) => [
    { role: "user", content: turn.asked },
    { role: "assistant", content: turn.drafted.answer.text },
  ]);
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: asked }];
  return {
    ...(chat ? { messages } : { prompt: asked }),
    ...(chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES }),
    stream: true,
    max_tokens: at("most").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    top_p: at("top-p").valueAsNumber,
    seed: at("seed").valueAsNumber,
    speculative: {
      report: true,
      steps: !plain,
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
        if (answer.tokens.at(-1)?.end) {
          pane.showEnd();
        }
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
  const chat = mode() === "chat";
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const { signal } = (going = new AbortController());
  const compare = at("compare").checked && method() !== "none";
  const titles = [method() === "none" ? "plain" : `speculative, ${method()}`, ...(compare ? ["plain"] : [])];
  const bodies = titles.map((_, i) => bodyOf(asked, i === 1));
  const shown = showTurn(asked, titles);
  const [drafted, plain] = shown.panes;
  // One after the other: two at once would slow each other. Plain comes second, so that it is plain decoding that finds
  // the prompt in the cache.
  let done = await run(drafted, path, bodies[0], signal);
  at("said").textContent = drafted.answer.text;
  if (done && compare) {
    done = await run(plain, path, bodies[1], signal);
  }
  if (drafted.answer.tokens.length && shown.root.isConnected) {
    const part = (pane, i) => ({ title: titles[i], answer: pane.answer });
    const turn = { asked, chat, drafted: part(drafted, 0), plain: done && compare ? part(plain, 1) : null };
    turns.push(turn);
    keep();
    await finish(shown, turn, signal);
  }
  return drafted.answer.tokens.length > 0;
}

function keep() {
  const part = (each) => each && { title: each.title, answer: each.answer.kept };
  kept.save(turns.map((turn) => ({ ...turn, drafted: part(turn.drafted), plain: part(turn.plain) })));
}

/** Shows the conversation that the store kept; what cannot be read is forgotten. */
function restore() {
  const part = (each) => each && { title: each.title, answer: Answer.from(each.answer) };
  try {
    for (const saved of kept.load()) {
      const turn = { ...saved, drafted: part(saved.drafted), plain: part(saved.plain) };
      const parts = [turn.drafted, turn.plain].filter((each) => each !== null);
      const shown = showTurn(turn.asked, parts.map((each) => each.title));
      shown.panes.forEach((pane, i) => {
        pane.answer = parts[i].answer;
        pane.add(pane.answer.tokens);
        pane.figures.textContent = figures(pane.answer);
      });
      turns.push(turn);
      finish(shown, turn, null);
    }
  } catch {
    reset();
  }
  showEnd();
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
  kept.save([]);
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  at("prompt").focus();
}

async function share() {
  const questions = turns.length ? turns.map((turn) => turn.asked) : [at("prompt").value];
  const link = linkOf(questions, settingsNow());
  const done = await navigator.clipboard?.writeText(link).then(() => true, () => false);
  history.replaceState(null, "", link); // where there is no clipboard, the address bar has it
  at("said").textContent = done ? "The link was copied." : "The link is in the address bar.";
  at("share").textContent = done ? "Copied" : "In the address bar";
  setTimeout(() => (at("share").textContent = "Copy link"), 2000);
}

function download() {
  const part = (each) => each && { title: each.title, ...each.answer.kept };
  const content = turns.map(({ asked, drafted, plain }) => ({ asked, drafted: part(drafted), plain: part(plain) }));
  const file = { model: at("model").textContent, settings: settingsNow(), turns: content };
  const link = element("a", "");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(file, null, 1)], { type: "application/json" }));
  link.download = "sametoken-conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Offers to ask the questions of a link; nothing is sent before the person agrees. */
function offerShared(found) {
  applySettings(found.settings ?? {});
  const number = found.questions.length;
  at("ask-again").textContent = number > 1 ? `Ask the ${number} questions of this link` : `Ask: ${found.questions[0]}`;
  at("shared").hidden = false;
  at("ask-again").addEventListener("click", async () => {
    at("shared").hidden = true;
    for (const question of found.questions) {
      at("prompt").value = question;
      await submit();
    }
  });
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
for (const id of ["temperature", "top-p", "theme", "method"]) {
  at(id).addEventListener("input", showSettings);
}
document.querySelector("aside").addEventListener("change", () => settings.save(settingsNow()));
at("share").addEventListener("click", share);
at("export").addEventListener("click", download);
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
const desk = matchMedia("(min-width: 52rem)").matches;
at("drafts").open = at("figures").open = desk;
at("settings").open = desk && innerHeight >= 900;
applySettings(chosen);
showSettings();
showLive(new Answer(0));
const shared = fromLink(location.hash);
if (shared) {
  offerShared(shared);
} else {
  restore();
}
connect();
