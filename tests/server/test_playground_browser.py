"""The pages for people in a real browser: what they show and ask, on a desk and a phone, and for whom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sametoken import LLM
from sametoken.control.choice import RequestedDraft
from server_checks import Gate, Running, running

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is missing: pip install 'sametoken[browser]'"
)
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install chromium")

PROMPT = "Hello! What do you like to do for fun?"
BODY = {"temperature": 0, "max_tokens": 128}
PATIENCE_MS = 60_000
DESK, PHONES = {"width": 1100, "height": 900}, ({"width": 390, "height": 844}, {"width": 320, "height": 640})


@pytest.fixture(scope="module")
def llm(one_thread: None) -> LLM:
    return LLM("embedded", "embedded", {"adaptive": False})  # a busy machine must not decide whether there are drafts


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        made = driver.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=options)
        yield made
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose console must stay free of errors but those of the network, which tests cause."""
    context = browser.new_context(viewport=DESK, reduced_motion="reduce")
    made, errors = context.new_page(), []
    made.set_default_timeout(PATIENCE_MS)
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    yield made
    context.close()
    assert not errors


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


READY = "#status:is([data-state=ready], [data-state=plain])"


def ready(page: Any, url: str, compare: bool = False) -> None:
    page.goto(url)
    page.wait_for_selector(READY)
    assert page.is_checked("#compare")  # side by side unless the person wants otherwise
    page.evaluate("compare => { document.getElementById('compare').checked = compare; }", compare)


def idle(page: Any) -> None:
    page.wait_for_selector("#stop:disabled", state="attached")


def test_it_streams_compares_and_explains_tokens(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url, compare=True)
        ask(page, PROMPT)
        idle(page)
        verdict = page.wait_for_selector(".verdict[data-kind]").inner_text()
        expected = server.post(
            "/v1/chat/completions",
            {**BODY, "messages": [{"role": "user", "content": PROMPT}], "speculative": {"report": True}},
        ).json()
    assert f"all {expected['usage']['completion_tokens']} tokens are the same" in verdict
    texts = [page.eval_on_selector_all(f".pane:nth-child({i}) .token:not(.end)", JOINED) for i in (1, 2)]
    assert texts == [expected["choices"][0]["message"]["content"].strip()] * 2
    assert page.locator(".pane:nth-child(1) .drafted").count() > 0
    assert page.locator(".pane:nth-child(2) .drafted").count() == 0
    stats = expected["choices"][0]["speculative"]["stats"]
    assert float(page.inner_text("#acceptance")) == round(stats["acceptance_length"], 2) > 1
    assert page.locator("#chart rect").count() >= 1
    assert page.inner_text("#said") == expected["choices"][0]["message"]["content"]
    assert page.inner_text(".turn .note") == ""  # for who wants no motion there is a replay only when asked for
    page.hover(".pane:nth-child(1) .drafted >> nth=0")
    assert "drafted at place 1, accepted\nprobability" in page.inner_text("#tip")
    page.focus(".pane:nth-child(1) .tokens")
    told = []
    for _ in range(page.locator(".pane:nth-child(1) .token").count()):
        page.keyboard.press("ArrowRight")
        told.append(page.inner_text("#tip"))
    assert sum("the target's own token" in words for words in told) > 0
    rejected = [words for words in told if "rejected at place" in words]
    assert len(rejected) == page.locator(".pane:nth-child(1) .refused").count() > 0
    page.hover(".pane:nth-child(2) .token >> nth=0")
    assert page.locator(".token.current").count() == 1
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


@pytest.mark.parametrize("slash", ["", "/"])
def test_pages_work_below_a_proxys_prefix(page: Any, llm: LLM, slash: str) -> None:
    with running(llm, root_path="/llm") as server:
        ready(page, server.url + "/llm" + slash)
        ask(page, PROMPT)
        idle(page)
        assert page.locator(".pane .token").count() > 1
        page.goto(server.url + "/llm/docs" + slash)
        page.wait_for_selector(".opblock")


JOINED = "found => found.map(each => each.textContent).join('').trim()"


def test_a_conversation_goes_on_and_a_text_is_continued(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        for turn in ("I just got a new dog!", "He is a beagle."):
            ask(page, turn)
            idle(page)
        prompts = [llm.render_chat([{"role": "user", "content": "I just got a new dog!"}])]
        first = page.eval_on_selector_all(".turn:nth-child(1) .token:not(.end)", JOINED)
        assert (
            first == server.post("/v1/completions", {**BODY, "prompt": prompts[0]}).json()["choices"][0]["text"].strip()
        )
        page.check("input[value=completion]")
        page.fill("#most", "5")
        ask(page, "I like")
        idle(page)
        assert page.locator(".turn:nth-child(3) .token").count() == 5
        page.click("#reset")
        assert page.locator(".turn").count() == 0


def test_it_wants_a_key_and_says_what_the_server_refuses(page: Any, llm: LLM) -> None:
    with running(llm, api_key=["secret"]) as server:
        page.goto(server.url)
        page.wait_for_selector("#status[data-state=locked]")
        assert "needs an API key" in page.inner_text("#status")
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        page.wait_for_selector("#status[data-state=refused]")
        assert "refused this API key" in page.inner_text("#status")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#status[data-state=ready]")
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        page.fill("#most", "0")
        ask(page, PROMPT)
        assert "max_tokens" in page.wait_for_selector(".error").inner_text()
        idle(page)
        assert page.input_value("#prompt") == PROMPT
        assert page.get_attribute("#status", "data-state") == "ready"


def stopped_in_the_middle(page: Any, server: Running, gate: Gate) -> None:
    gate.let(2)
    page.wait_for_selector("#turns .token")
    server.stop()
    deadline = time.monotonic() + 60
    while server.server.worker.engine._inbox.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    gate.open()


def test_it_says_that_the_server_went_and_goes_on_when_it_is_back(page: Any) -> None:
    own = LLM("embedded", "embedded")
    with running(own) as server:
        port = int(server.url.rpartition(":")[2])
        ready(page, server.url)
        gate = Gate(own)
        ask(page, PROMPT)
        stopped_in_the_middle(page, server, gate)
        assert "server stopped" in page.wait_for_selector(".error").inner_text()
        page.wait_for_selector("#status[data-state=lost]")
    with running(own, port=port):
        page.wait_for_selector("#status[data-state=ready]")
        ask(page, PROMPT)
        page.wait_for_selector(".turn:nth-child(2) .token.end")
        idle(page)


HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>[a](javascript:window.hacked=1)"


def test_hostile_text_is_text(page: Any, llm: LLM) -> None:
    """Of the person, of the model, and in an error of the server."""

    def said(route: Any) -> None:
        choice = {"index": 0, "delta": {"role": "assistant", "content": HOSTILE}, "finish_reason": None}
        chunks = [{"choices": [choice]}, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        lines = [f"data: {json.dumps({'id': 'x', 'model': HOSTILE, **chunk})}\n\n" for chunk in chunks]
        body = "".join([*lines, "data: [DONE]\n\n"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    def refused(route: Any) -> None:
        route.fulfill(status=400, content_type="application/json", body=json.dumps({"error": {"message": HOSTILE}}))

    with running(llm) as server:
        ready(page, server.url)
        for answer in (said, refused):
            page.route("**/v1/chat/completions", answer)
            ask(page, HOSTILE)
            idle(page)
            page.unroute("**/v1/chat/completions")
        assert HOSTILE in page.inner_text(".asked >> nth=0")
        assert HOSTILE in page.inner_text(".error >> nth=-1")
        assert "<script>" in page.inner_text("#turns .turn >> nth=0")
        assert page.evaluate("window.hacked") is None
        assert page.locator("#turns :is(img, script, a[href^=javascript])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_readable_in_light_and_dark(page: Any, llm: LLM, scheme: str) -> None:
    page.set_viewport_size(PHONES[0])
    page.emulate_media(color_scheme=scheme)
    with running(llm) as server:
        ready(page, server.url)
        for part in ("drafts", "settings", "figures"):
            page.click(f"#{part} summary")
        page.check("#compare")
        ask(page, PROMPT)
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
        page.click(".pane .token >> nth=1")
        page.fill("#most", "0")
        ask(page, PROMPT)
        page.wait_for_selector(".error")
    for size in PHONES:
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.locator("#send").is_visible()
        for bar, seconds in page.evaluate(BARS):
            assert bar["top"] >= seconds["bottom"]
            assert bar["right"] <= seconds["right"]
    page.hover("#turns .token.drafted >> nth=0")
    for selector in TEXTS:
        assert page.evaluate(CONTRAST, [selector, "color"]) >= 4.5, selector
    for selector, edge in EDGES.items():
        assert page.evaluate(CONTRAST, [selector, edge]) >= 3, selector


# Of each line of the timeline the rectangles of its bar and of the time.
BARS = """() => [...document.querySelectorAll(".timeline .bar")].map(bar =>
  [bar, bar.nextElementSibling].map(each => each.getBoundingClientRect().toJSON()))"""
# WCAG 2.2 asks for 4.5 between text and its background (1.4.3), and 3 for what edges must be seen (1.4.11).
TEXTS = (
    "body", "#model", "a", "#status", "#prompt", "#method", "#send", "#reset", ".asked", ".pane h3", ".figures",
    ".verdict", ".token.drafted", ".token.refused", ".token.end", ".error", "#tip", "dt", "dd", "figcaption", ".note",
    "output", ".step h4", ".node.taken", ".bar.fast span",
)  # fmt: skip
EDGES = {
    "#turns .drafted:not(.current)": "borderBottomColor", "#turns .refused": "borderBottomColor",
    "#prompt": "borderTopColor", "#method": "borderTopColor", "#reset": "borderTopColor", "#key": "borderTopColor",
    ".token.current": "outlineColor", "#prompt:focus-visible": "outlineColor",
    "#turns .bar:not(.fast) span": "backgroundColor", "#turns .forward": "borderBottomColor",
}  # fmt: skip
# The contrast of a colour of an element and the nearest background that is not transparent; a fill's is outside of it.
CONTRAST = """([selector, property]) => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const part = [r, g, b][i] / 255;
    return sum + weight * (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  let at = document.querySelector(selector);
  if (!at) throw new Error(`no ${selector}`);
  const ink = light(numbers(getComputedStyle(at)[property]));
  if (property !== "color") at = at.parentElement;
  while (numbers(getComputedStyle(at).backgroundColor)[3] === 0) at = at.parentElement;
  const page = light(numbers(getComputedStyle(at).backgroundColor));
  return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
}"""


def sent(page: Any) -> list[dict[str, Any]]:
    """The bodies that the page goes on to send."""
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def test_the_method_that_is_chosen_is_asked_for(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        bodies, answers = sent(page), []
        offered = page.eval_on_selector_all("#method option", "found => found.map(each => each.value)")
        assert offered == ["", *llm.methods, "auto", "none"]
        assert llm.method in page.inner_text("#method option:checked")
        for turn, method in enumerate(offered, start=1):
            page.select_option("#method", method)
            assert page.is_disabled("#compare") == page.is_disabled("#length") == (method == "none")
            page.click("#reset")
            ask(page, PROMPT)
            page.wait_for_selector(".token.end")
            idle(page)
            assert bodies[turn - 1]["speculative"].get("method", "") == method
            title = "plain" if method == "none" else f"speculative, {method or llm.method}"
            assert page.inner_text(".pane h3") == title
            answers.append(page.eval_on_selector_all("#turns .token", JOINED))
            drafted = page.locator("#turns .drafted").count()
            assert drafted == 0 or method != "none"
            assert drafted > 0 or method not in ("", llm.method)
        assert len(set(answers)) == 1


def test_a_server_that_drafts_nothing_says_so_and_drafts_if_asked(page: Any, one_thread: None) -> None:
    with running(LLM("embedded", None, {"method": "none", "adaptive": False})) as server:
        ready(page, server.url)
        assert page.get_attribute("#status", "data-state") == "plain"
        assert "without drafts" in page.inner_text("#status")
        assert page.is_visible("#no-draft")
        assert page.is_disabled("#compare")
        page.select_option("#method", "ngram")
        assert page.is_hidden("#no-draft")
        assert page.is_enabled("#compare")


def test_tokens_stand_together_with_those_of_their_forward(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url, compare=True)
        ask(page, PROMPT)
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
        for pane in (1, 2):
            groups = page.eval_on_selector_all(f".pane:nth-child({pane}) .forward", COUNTED)
            assert page.locator(f".bar:nth-child({3 * pane - 1}) > span").count() == len(groups)
            written = page.inner_text(f".pane:nth-child({pane}) .figures")
            assert f"{sum(groups)} tokens in {len(groups)} forwards" in written
            assert max(groups) > 1 or pane == 2
        page.click(".pane:nth-child(1) .drafted >> nth=0")
        number = page.eval_on_selector(".pane:nth-child(1) .drafted", "found => +found.parentElement.dataset.forward")
        size = page.locator(f".pane:nth-child(1) .forward[data-forward='{number}'] .token").count()
        title = page.inner_text(".step h4")
        assert title.startswith(
            f"Forward {number + 1} of {len(forwards(page))} brought {size} tokens; draft_target had "
        )
        assert page.locator(".step :is(.taken, .own)").count() == size
        rejected = page.locator(f".pane:nth-child(1) .forward[data-forward='{number}'] .refused").count()
        assert (page.locator(".step .rejected").count() > 0) == (rejected > 0)


def test_the_tree_of_a_forward_is_drawn_on_demand(page: Any, one_thread: None) -> None:
    own = LLM("embedded", "embedded", {"adaptive": False, "tree_top_k": 2, "max_total_draft_tokens": 7})
    page.set_viewport_size({"width": 1280, "height": 640})
    with running(own) as server:
        ready(page, server.url, compare=True)
        bodies = sent(page)
        ask(page, PROMPT)
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
        assert [body["speculative"]["steps"] for body in bodies] == [True, False]
        body = {**BODY, "messages": [{"role": "user", "content": PROMPT}], "speculative": {"steps": True}}
        steps = server.post("/v1/chat/completions", body).json()["choices"][0]["speculative"]["steps"]
        assert page.locator(".step").count() == 0
        assert max(len(step["tokens"]) - sum(step["accepted"]) for step in steps) > 2
        for number, step in list(enumerate(steps))[:8]:
            page.click(f".pane:nth-child(1) .forward[data-forward='{number}'] .token >> nth=0")
            assert (
                f"; draft_target had guessed {len(step['tokens'])} tokens" in page.inner_text(".step h4") or not number
            )
            drawn = page.evaluate(DRAWN)
            expected = [place_of(step, at) for at in range(len(step["tokens"]))]
            assert sorted(drawn) == sorted(expected)
            box = page.locator(".step").bounding_box()
            assert 0 <= box["y"] <= 640 - box["height"], "seen without scrolling"
        page.reload()
        page.wait_for_selector(READY)
        page.click(f".pane:nth-child(1) .forward[data-forward='{number}'] .token >> nth=0")
        assert page.evaluate(DRAWN) == drawn, "trees outlive a reload"
        page.set_viewport_size(PHONES[1])
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONES[1]["width"]


def test_guesses_of_several_drafters_name_who_said_them(page: Any, one_thread: None) -> None:
    own = LLM("embedded", "embedded", {"adaptive": False, "method": "auto"})
    own.engine.drafting.policy.choose = lambda rows, beside=0: [  # type: ignore[method-assign]
        RequestedDraft(row.limit, row.methods, "" if row.limit else "end", joined=True) for row in rows
    ]
    with running(own) as server:
        body = {**BODY, "messages": [{"role": "user", "content": PROMPT}], "speculative": {"steps": True}}
        for _ in range(2):  # later ones may copy from these
            steps = server.post("/v1/chat/completions", body).json()["choices"][0]["speculative"]["steps"]
        ready(page, server.url, compare=True)
        ask(page, PROMPT)
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
        number, step = max(enumerate(steps), key=lambda each: len({tuple(said) for said in each[1]["drafters"]}))
        names = list(dict.fromkeys(name for said in step["drafters"] for name in said))
        assert len(names) > 1
        page.click(f".pane:nth-child(1) .forward[data-forward='{number}'] .token >> nth=0")
        assert f"; {' and '.join(names)} had guessed {len(step['tokens'])} tokens" in page.inner_text(".step h4")
        drawn = page.locator(".step .said").all_inner_texts()
        assert sorted(drawn) == sorted(", ".join(said) for said in step["drafters"])


def place_of(step: dict[str, Any], at: int) -> list[Any]:
    """Depth of a guess, whether it was accepted, and its probability in percent, as the page shows it."""
    depth, node = 0, at
    while node >= 0:
        depth, node = depth + 1, step["parents"][node]
    chance = round(step["probabilities"][at], 4)
    return [depth, step["accepted"][at], f"{100 * chance:.{1 if chance < 0.1 else 0}f} %"]


# Every drawn guess: how many lists it is inside of, whether it is on the path, and its probability.
DRAWN = """() => [...document.querySelectorAll(".step .node:is(.taken, .rejected)")].map(node => {
  let depth = 0;
  for (let at = node.closest("ul"); !at.classList.contains("tree"); at = at.parentElement.closest("ul")) depth++;
  return [depth, node.classList.contains("taken"), node.querySelector("small").textContent];
})"""


COUNTED = "found => found.map(each => each.querySelectorAll('.token').length)"


def forwards(page: Any) -> list[int]:
    return page.eval_on_selector_all(".pane:nth-child(1) .forward", COUNTED)  # type: ignore[no-any-return]


def test_a_loss_is_shown_as_a_loss(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        kinds = page.evaluate(VERDICTS)
    assert kinds == [
        ["faster", "Speed-up 2.00. The text is equal: all 1 tokens are the same."],
        ["slower", "Slower: 0.50 of the speed of plain decoding. The text is equal: all 1 tokens are the same."],
        ["slower", "As fast as plain decoding. The text is equal: all 1 tokens are the same."],
        ["different", "Different from token 1 on. Drafts must never change a token; please report this."],
    ]


VERDICTS = """async () => {
  const { judge } = await import("./playground/turn.js");
  const answer = (seconds, id) => ({ seconds, ids: [id] });
  return [[1, 2, 7], [2, 1, 7], [1, 1.001, 7], [1, 1, 8]].map(([fast, slow, id]) => {
    const verdict = document.createElement("p");
    judge(verdict, answer(fast, 7), answer(slow, id));
    return [verdict.dataset.kind, verdict.textContent];
  });
}"""


def test_a_conversation_outlives_a_reload_and_travels_by_link(page: Any, browser: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        page.fill("#system", "You sell coffee.")
        page.fill("#seed", "5")
        page.evaluate("document.getElementById('temperature').value = 0.7")
        bodies = sent(page)
        for question in ("A latte, please.", "With oat milk."):
            ask(page, question)
            idle(page)
        assert bodies[0]["messages"][0] == {"role": "system", "content": "You sell coffee."}
        assert len(bodies[1]["messages"]) == 4
        answers = page.eval_on_selector_all("#turns .token", JOINED)
        with page.expect_download() as saved:
            page.click("#export")
        assert [turn["asked"] for turn in json.loads(saved.value.path().read_text())["turns"]] == [
            "A latte, please.",
            "With oat milk.",
        ]
        page.click("#share")
        page.wait_for_url(lambda url: len(url.partition("#")[2]) > 10)
        link = page.url
        page.goto("about:blank")
        page.goto(server.url)
        page.wait_for_selector(READY)
        assert page.eval_on_selector_all("#turns .token", JOINED) == answers
        assert page.input_value("#seed") == "5"
        ask(page, "Thank you.")
        idle(page)
        assert len(bodies[2]["messages"]) == 6
        other = browser.new_context(viewport=DESK, reduced_motion="reduce").new_page()
        other.set_default_timeout(PATIENCE_MS)
        other.goto(link)
        other.wait_for_selector(READY)
        assert other.locator(".turn").count() == 0, "a link asks nothing by itself"
        other.click("#ask-again")
        other.wait_for_selector(".turn:nth-child(2) .token.end")
        idle(other)
        assert other.eval_on_selector_all("#turns .token", JOINED) == answers
        other.context.close()


def test_a_broken_link_or_store_does_no_harm(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        for name, broken in (("sametoken-turns", '[{"asked": 1}]'), ("sametoken-settings", "7")):
            page.evaluate("([name, value]) => localStorage.setItem(name, value)", [name, broken])
        page.goto(server.url + "/#not-a-link")
        page.reload()
        page.wait_for_selector(READY)
        ask(page, PROMPT)
        page.wait_for_selector(".token.end")


def test_what_matters_is_seen_at_once_on_a_small_screen(page: Any, llm: LLM) -> None:
    page.set_viewport_size({"width": 1280, "height": 640})
    with running(llm) as server:
        ready(page, server.url, compare=True)
        ask(page, PROMPT)
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
    for selector in (".asked", ".verdict", ".panes", ".timeline", "#prompt", "#send", "#method", "#acceptance"):
        box = page.locator(selector).bounding_box()
        assert 0 <= box["y"] <= 640 - box["height"], selector


def test_nothing_jumps_while_an_answer_streams(page: Any, one_thread: None) -> None:
    own = LLM("embedded", "embedded", {"adaptive": False})
    with running(own) as server:
        ready(page, server.url, compare=True)
        gate = Gate(own)
        ask(page, PROMPT)
        gate.let(2)
        page.wait_for_selector("#turns .token")
        page.evaluate(SHIFTS)
        gate.open()
        page.wait_for_selector(".verdict[data-kind]")
        idle(page)
        assert page.locator("#turns .token").count() > 10
        assert page.evaluate("window.shifted") <= 0.01, "Chromium's layout shift, of which 0.1 is called good"


SHIFTS = """() => {
  window.shifted = 0;
  const add = found => found.getEntries().forEach(entry => { window.shifted += entry.value; });
  new PerformanceObserver(add).observe({ type: "layout-shift" });
}"""


def test_the_keyboard_reaches_everything_and_is_seen_there(page: Any, llm: LLM) -> None:
    with running(llm, api_key=["secret"]) as server:
        page.goto(server.url)
        page.wait_for_selector("#status[data-state=locked]")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#status[data-state=ready]")
        page.uncheck("#compare")
        page.click(".suggestion >> nth=0")
        page.wait_for_selector(".token.end")
        idle(page)
        outlines: dict[str, float] = {}
        while len(outlines) < 40:
            page.keyboard.press("Tab")
            place, outline = page.evaluate(FOCUSED)
            if place in outlines:
                break
            outlines[place] = outline
    drafts = {"Drafts", "method", "length", "fixed", "compare"}
    settings = {"Settings", "mode", "system", "temperature", "top-p", "most", "seed", "theme", "key"}
    buttons = {"send", "reset", "share", "export"}
    assert {"API", "This answer", "tokens", "prompt", *buttons, *drafts, *settings} <= outlines.keys()
    assert all(outline >= 2 for place, outline in outlines.items() if place != "BODY"), outlines


FOCUSED = """() => {
  const at = document.activeElement;
  const place = at === document.body ? "BODY" : at.id || at.name || at.className || at.textContent;
  return [place, parseFloat(getComputedStyle(at).outlineWidth)];
}"""


def test_every_control_has_a_name(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "checkbox", "radio", "slider", "spinbutton", "textbox", "combobox", "link", "DisclosureTriangle"}
    found = [node for node in tree if node.get("role", {}).get("value") in roles]
    assert len(found) > 15
    assert [node for node in found if not node["name"]["value"].strip()] == []


def test_the_reference_shows_every_operation_and_asks_no_other_host(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url + "/docs")
        page.wait_for_selector(".opblock")
        shown = page.eval_on_selector_all(".opblock-summary-path", "found => found.map(each => each.dataset.path)")
        paths = server.get("/openapi.json").json()["paths"]
        assert sorted(shown) == sorted(path for path, methods in paths.items() for _ in methods)
        page.click(".opblock-summary >> nth=0")
        page.wait_for_selector(".opblock-body")
    assert asked
    assert all(url.startswith(server.url + "/") for url in asked)
