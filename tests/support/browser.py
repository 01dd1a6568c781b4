"""Chromium for tests of pages. `.ci/run` installs it, and pip its driver; elsewhere these tests say what they need."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_browser() -> Any:
    """playwright's module. A module of tests is left out where there is no Chromium or no driver of it."""
    if not any(map(shutil.which, NAMES)):
        pytest.skip("no Chromium on this machine; apt-get install chromium, as .ci/run does", allow_module_level=True)
    return pytest.importorskip("playwright.sync_api", reason="the dev extra installs playwright")


@contextmanager
def browser_with(*flags: str) -> Iterator[Any]:
    """A browser that was started with these flags."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*flags, "--no-sandbox"])
        yield browser
        browser.close()
