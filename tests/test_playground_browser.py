"""The page at / in a real browser: it streams, compares, says what is wrong, and outlives a restart of the server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from server_checks import Gate, Running, running

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is missing: pip install 'foretoken[browser]'"
)
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install chromium")

PROMPT = "Hello! What do you like to do for fun?"
PATIENCE_MS = 60_000
WIDTHS = {"desk": 1100, "phone": 360}


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
    context = browser.new_context(viewport={"width": WIDTHS["desk"], "height": 900}, reduced_motion="reduce")
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


def ready(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#status[data-state=ready]")


def idle(page: Any) -> None:
    page.wait_for_selector("#stop:disabled", state="attached")


def test_it_streams_compares_and_explains_tokens(page: Any, llm: LLM) -> None:
    with running(llm) as server:
        ready(page, server.url)
        page.check("#compare")
        ask(page, PROMPT)
        verdict = page.wait_for_selector(".verdict").inner_text()
        idle(page)
        expected = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 128},
        ).json()
    assert f"all {expected['usage']['completion_tokens']} tokens are the same" in verdict
    texts = [page.eval_on_selector_all(f".pane:nth-child({i}) .token:not(.end)", JOINED) for i in (1, 2)]
    assert texts == [expected["choices"][0]["message"]["content"].strip()] * 2
    assert page.locator(".pane:nth-child(1) .drafted").count() > 0
    assert page.locator(".pane:nth-child(2) .drafted").count() == 0
    assert float(page.inner_text("#acceptance")) > 1
    assert page.locator("#chart rect").count() >= 1
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
            first
            == server.post("/v1/completions", {"prompt": prompts[0], "temperature": 0, "max_tokens": 128})
            .json()["choices"][0]["text"]
            .strip()
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
        page.wait_for_selector("#status[data-state=lost]")
        assert "API key" in page.inner_text("#status")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#status[data-state=ready]")
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        page.fill("#most", "0")
        ask(page, PROMPT)
        assert "max_tokens" in page.wait_for_selector(".error").inner_text()
        idle(page)
        assert page.get_attribute("#status", "data-state") == "ready"


def stopped_in_the_middle(page: Any, server: Running, gate: Gate) -> None:
    gate.let(2)
    page.wait_for_selector(".token")
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_readable_in_light_and_dark(page: Any, llm: LLM, scheme: str) -> None:
    page.set_viewport_size({"width": WIDTHS["phone"], "height": 700})
    page.emulate_media(color_scheme=scheme)
    with running(llm) as server:
        ready(page, server.url)
        ask(page, PROMPT)
        page.wait_for_selector(".token.end")
        idle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"]
    for selector in ("body", ".token.drafted", "#prompt", "#send", ".figures"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


# WCAG's contrast of a text and the nearest background that is not transparent.
CONTRAST = """selector => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const part = [r, g, b][i] / 255;
    return sum + weight * (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  let at = document.querySelector(selector);
  const ink = light(numbers(getComputedStyle(at).color));
  while (numbers(getComputedStyle(at).backgroundColor)[3] === 0) at = at.parentElement;
  const page = light(numbers(getComputedStyle(at).backgroundColor));
  return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
}"""
