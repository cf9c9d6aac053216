"""A server with the real model, and headless Chromium; both started once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from live_server import live_server

MODEL = "smollm2-135m-instruct"
expect.set_options(timeout=30_000)  # milliseconds: a busy machine is no fault of the page


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with live_server(MODEL) as server:
        yield server.url


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, url: str) -> Iterator[Page]:
    """The page at the width and in the scheme asked for. What it asks of others, or complains of, fails its test."""
    width, scheme = getattr(request, "param", (1280, "dark"))
    opened = browser.new_page(viewport={"width": width, "height": 780}, color_scheme=scheme)
    bad: list[str] = []
    opened.on("request", lambda asked: bad.append(asked.url) if not asked.url.startswith(url + "/") else None)
    opened.on("pageerror", lambda error: bad.append(str(error)))
    opened.on("console", lambda said: bad.append(said.text) if said.type in ("error", "warning") else None)
    opened.goto(url)
    yield opened
    opened.close()
    assert not bad
