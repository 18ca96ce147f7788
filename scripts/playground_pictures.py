"""Pictures of the playground for docs/: python scripts/playground_pictures.py [FOLDER]; FOLDER gets some to look at.

The target is the embedded one at the cost of a larger one (benchmarks/deepen.py), which answers within HTTP's own time
otherwise. Needs the extra `browser` and Debian's chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
WIDENED = ("--copies", "4", "--parameters", "1.0e8")
QUESTIONS = ("Hi! A large latte with oat milk, please.", "I want to see a movie tonight.")
DESK, PHONE = {"width": 1280, "height": 640}, {"width": 390, "height": 844}
PORT = 8765


class Picture(NamedTuple):
    """One picture: how large, light or dark, what is on the page; with `tree` that of this forward and nothing else."""

    name: str
    size: dict[str, int]
    scheme: str
    questions: tuple[str, ...] = QUESTIONS
    compare: bool = True
    tree: int | None = None


KEPT = (
    Picture("playground", DESK, "light"),
    Picture("playground-dark", DESK, "dark"),
    Picture("playground-phone", PHONE, "light", QUESTIONS[:1]),
)
TREE = Picture("playground-tree", DESK, "light", ("Hello! What do you like to do for fun?",), tree=1)
TREES = ("--tree-top-k", "2", "--max-total-draft-tokens", "7")
LOOKED_AT = (
    Picture("welcome", DESK, "light", ()),
    Picture("welcome-phone", PHONE, "dark", ()),
    Picture("chat", DESK, "dark", QUESTIONS, False),
    Picture("phone-dark", PHONE, "dark", QUESTIONS),
)


def main(folder: str | None = None) -> None:
    with sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=options)
        with served() as url:
            keep(browser, url, KEPT)
            if folder is not None:
                look(browser, url, Path(folder))
        with served(*TREES) as url:
            keep(browser, url, (TREE,))
        browser.close()


def keep(browser: Browser, url: str, pictures: Sequence[Picture]) -> None:
    """Pictures of the documentation."""
    shown(browser, url, pictures[0]).context.close()  # the first requests of a server are its slowest
    for picture in pictures:
        page = shown(browser, url, picture)
        whole = page if picture.tree is None else page.locator(".step")
        whole.screenshot(path=ROOT / "docs" / f"{picture.name}.png")
        page.context.close()


@contextmanager
def served(*more: str) -> Iterator[str]:
    """A server that drafts always, so that what is drafted does not depend on the machine."""
    with tempfile.TemporaryDirectory() as target:
        subprocess.run([sys.executable, ROOT / "benchmarks/deepen.py", "embedded", target, *WIDENED], check=True)
        serve = [sys.executable, "-m", "sametoken.cli", "serve", target, "--served-model-name", "embedded, widened"]
        process = subprocess.Popen([*serve, "--draft", "embedded", "--no-adaptive", "--port", str(PORT), *more])
        url = f"http://127.0.0.1:{PORT}"
        try:
            while not _answers(url):
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def opened(browser: Browser, url: str, size: Any, scheme: Any) -> Page:
    """The page, ready for a question."""
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", has_touch=size is PHONE)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#status[data-state=ready]")
    return page


def shown(browser: Browser, url: str, picture: Picture) -> Page:
    """The page after its questions."""
    page = opened(browser, url, picture.size, picture.scheme)
    page.evaluate("compare => { document.getElementById('compare').checked = compare; }", picture.compare)
    for number, question in enumerate(picture.questions, start=1):
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(f".turn:nth-child({number})")
        page.wait_for_selector("#stop:disabled", state="attached")
    if picture.tree is not None:
        page.click(f".forward[data-forward='{picture.tree}'] .token >> nth=0")
        page.mouse.move(0, 0)  # away from the token, whose tip would hide others
    return page


def look(browser: Browser, url: str, folder: Path) -> None:
    """Pictures of what is not in the documentation."""
    for picture in LOOKED_AT:
        page = shown(browser, url, picture)
        page.screenshot(path=folder / f"{picture.name}.png")
    for name, key in (("focus-composer", "#prompt"), ("focus-tokens", ".pane .tokens"), ("focus-method", "#method")):
        page = shown(browser, url, KEPT[0])
        page.focus(key)
        page.keyboard.press("ArrowRight" if name == "focus-tokens" else "Shift")
        page.screenshot(path=folder / f"{name}.png")
    page = opened(browser, url, PHONE, "light")
    page.click("#settings summary")
    page.screenshot(path=folder / "settings-phone.png", full_page=True)
    page.fill("#most", "0")
    page.fill("#prompt", QUESTIONS[0])
    page.press("#prompt", "Enter")
    page.wait_for_selector(".error")
    page.screenshot(path=folder / "error-phone.png", full_page=True)
    for scheme in ("light", "dark"):
        page = opened(browser, url, DESK, scheme)
        page.fill("#most", "0")
        page.fill("#prompt", QUESTIONS[0])
        page.press("#prompt", "Enter")
        page.wait_for_selector(".error")
        page.screenshot(path=folder / f"error-{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
