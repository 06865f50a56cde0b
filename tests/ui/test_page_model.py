"""The page over the real service: one walk through all of it, as a person takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.real_server import starter_server
from tests.ui.conftest import Tab

pytestmark = [pytest.mark.browser, pytest.mark.model]


def test_a_chat_and_then_every_tab(starter_path: Path, home: Path, context: BrowserContext) -> None:
    with starter_server(starter_path, home, "--ctx", "1024", has_page=True) as server:
        tab = Tab(context.new_page(), server.url)
        tab.page.set_default_timeout(30_000)
        tab.page.goto(server.url)  # which shows that it loads until the page is drawn
        expect(tab.page.locator("#composer .submit-button")).to_be_visible(timeout=60_000)
        expect(tab.page.locator("#model-picker input")).not_to_have_value("", timeout=30_000)
        tab.type("Say hi in two words.")
        expect(tab.page.locator("#messages .bot-row small")).to_contain_text("tokens/s", timeout=60_000)
        page = tab.page
        for name in page.locator("button[id^=nav-]").evaluate_all("all => all.map(each => each.id)"):
            page.click(f"#{name}")
            page.wait_for_timeout(2500)  # long enough for each view to be drawn anew by its timer
        page.click("#nav-models")
        expect(page.locator("#models-list .entry").first).to_be_visible()
        expect(page.locator("#models-now .now-row")).to_contain_text("loaded on CPU")
        assert not tab.faults
        page.close()
    lines = (home / "logs" / "nemolocal.log").read_text(encoding="utf-8").splitlines()
    # A browser that leaves in the middle of a response is no fault of the page.
    faults = [line for line in lines if " ERROR " in line and "without completing response" not in line]
    assert not faults
