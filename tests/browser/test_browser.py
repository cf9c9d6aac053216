"""The page as a person has it: at a desk and on a phone, dark and light, with the keyboard alone.

SHOTS=FOLDER leaves a picture of each view there.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from live_server import wait_idle
from playwright.sync_api import Page, expect

QUESTION = "Name three primary colors."
EVERYWHERE = pytest.mark.parametrize(
    "page", [(1280, "dark"), (1280, "light"), (360, "dark"), (360, "light")], indirect=True
)
BOTH = pytest.mark.parametrize("page", [(1280, "light"), (360, "dark")], indirect=True)


def shoot(page: Page, name: str) -> None:
    folder = os.environ.get("SHOTS")
    if folder:
        width = page.viewport_size["width"] if page.viewport_size else 0
        dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        page.screenshot(path=Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png")


def is_wide(page: Page) -> bool:
    return page.viewport_size is not None and page.viewport_size["width"] > 1000


def say(page: Page, text: str, **parameters: str) -> None:
    """Set parameters, write, press Enter."""
    page.locator("#parameters").evaluate("element => { element.open = true; }")
    for name, value in parameters.items():
        page.fill(f"#{name}", value)
    page.locator("#parameters").evaluate("element => { element.open = false; }")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


@EVERYWHERE
def test_a_chat_and_the_engine_at_work(page: Page, url: str) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator("#model")).to_contain_text("smollm2-135m-instruct")
    say(page, QUESTION, temperature="0")
    expect(page.locator(".facts")).to_contain_text("ended: stop")
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    told = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert page.locator(".assistant .words").evaluate("element => element.textContent") == told
    assert "".join(page.locator(".token").all_text_contents()) == told
    page.locator(".token").nth(2).hover()
    token = page.locator(".token").nth(2).text_content()
    expect(page.locator("#tip")).to_contain_text(f'"{token}"  ←')
    shoot(page, "chat")
    if not is_wide(page):
        assert not page.locator("#engine").is_visible()
        page.click("#tab-engine")
    expect(page.locator("#link")).to_contain_text("live")
    expect(page.locator("#batch-text")).to_contain_text("sequences")
    expect(page.locator("#legend")).to_contain_text("cache alone")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#rows button[data-request^=page-]").first.click()
    expect(page.locator("#explained")).to_contain_text("first token after")
    expect(page.locator("#explained")).to_contain_text("decode")
    shoot(page, "engine")


@BOTH
def test_the_keyboard_is_enough(page: Page) -> None:
    say(page, QUESTION, temperature="0")
    expect(page.locator(".facts")).to_contain_text("ended: stop")
    page.focus(".words[tabindex]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.chosen")).to_have_text(" primary")
    expect(page.locator("#tip")).to_contain_text('" primary"')
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    if not is_wide(page):
        page.focus("#tab-chat")
        page.keyboard.press("ArrowRight")
        assert page.locator("#engine").is_visible() and not page.locator("#chat").is_visible()


def test_stop_and_regenerate(page: Page, url: str) -> None:
    say(page, "Count to a thousand.", max_tokens="2000", temperature="1", seed="7")
    expect(page.locator(".token").nth(5)).to_be_visible()
    page.click("#stop-answer")
    expect(page.locator(".facts")).to_contain_text("ended: stopped")
    first = page.locator(".assistant .words").inner_text()
    page.click("#again")
    expect(page.locator(".assistant")).to_have_count(1)
    expect(page.locator(".token").nth(5)).to_be_visible()
    page.click("#stop-answer")
    again = page.locator(".assistant .words").inner_text()
    short = min(len(first), len(again))
    assert short and first[:short] == again[:short]  # the seed is the same, and so are the tokens
    assert wait_idle(url)  # what was stopped here is stopped there
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)


def test_text_is_never_markup(page: Page) -> None:
    say(page, "<img src=x onerror=alert(1)><b>bold</b>", max_tokens="4")
    expect(page.locator(".facts")).to_be_visible()
    assert page.locator("#log img, #log b").count() == 0
    assert "<b>bold</b>" in page.locator(".user").inner_text()


@BOTH
def test_the_theme_follows_the_system_until_one_is_chosen(page: Page) -> None:
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ground = "getComputedStyle(document.body).backgroundColor"
    white, black = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    assert page.evaluate(ground) == (black if dark else white)
    page.click("#theme")
    assert page.evaluate(ground) == white
    page.click("#theme")
    assert page.evaluate(ground) == black
    page.reload()
    assert page.evaluate(ground) == black
