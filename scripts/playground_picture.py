"""A picture of the playground of a running server: python scripts/playground_picture.py URL FILE.png [light|dark]."""

from __future__ import annotations

import sys

from playwright.sync_api import sync_playwright

QUESTIONS = ("Hello! What do you like to do for fun?", "I like music. Which bands do you like best?")


def main(url: str, path: str, scheme: str = "light") -> None:
    with sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=options)
        page = browser.new_page(viewport={"width": 1100, "height": 990}, color_scheme=scheme, reduced_motion="reduce")
        page.goto(url)
        page.wait_for_selector("#status[data-state=ready]")
        page.check("#compare")
        page.check("#fixed")
        for number, question in enumerate(QUESTIONS, start=1):
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            page.wait_for_selector(f".turn:nth-child({number}) .verdict")
            page.wait_for_selector("#stop:disabled", state="attached")
        page.hover(".pane .refused >> nth=-1")
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
