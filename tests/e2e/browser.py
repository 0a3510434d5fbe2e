"""Headless Chromium, as Debian packages it, for looking at what the servers show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, expect, sync_playwright

from tests.programs import missing

PATIENCE_SECONDS = 120
# Root may not use Chromium's sandbox, and a container's /dev/shm is small. No request leaves the machine.
OPTIONS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# MLflow opens it beside every page that a browser sees for the first time.
WITHOUT_ASSISTANT = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
"""


@contextmanager
def page() -> Iterator[Page]:
    """A page of a fresh browser, as wide as a laptop's; skips the test where Chromium is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        try:
            found = browser.new_page(viewport={"width": 1280, "height": 800})
            found.add_init_script(WITHOUT_ASSISTANT)
            found.set_default_timeout(1000 * PATIENCE_SECONDS)
            expect.set_options(timeout=1000 * PATIENCE_SECONDS)
            yield found
        finally:
            browser.close()
