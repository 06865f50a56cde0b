"""The Models and Hardware tabs in a real browser, on described machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from nemolocal.hardware import load_profile
from nemolocal.service import LoadedModel
from nemolocal.shelf import Shelf
from tests.ui.conftest import Site, Tab

pytestmark = pytest.mark.browser

PROFILES = Path(__file__).parents[1] / "hardware_profiles"


def on(site: Site, profile: str) -> None:
    """Let the page's machine be another one."""
    machine = load_profile(PROFILES / f"{profile}.toml")
    site.service.shelf = Shelf(site.service.config, detect=lambda: machine)


def test_models_from_the_list_to_the_bars_and_their_settings(site: Site, tab: Tab) -> None:
    on(site, "2x-rtx-3090")
    page = tab.page
    page.click("#nav-models")
    expect(page.locator("#models-list .entry").first).to_be_visible()
    expect(page.locator("#composer")).not_to_be_visible()
    page.fill("#models-words textarea, #models-words input", "llama")
    expect(page.locator("#models-list .entry").first).to_contain_text("Llama")
    page.click('.entry[data-ref="llama-3.1-nemotron-70b"]')
    detail = page.locator("#models-detail")
    expect(detail.locator("h2")).to_have_text("Llama 3.1 Nemotron 70B Instruct")
    expect(detail.locator(".device")).to_have_count(3)  # two cards and the RAM
    expect(detail.locator(".device").first).to_contain_text("RTX 3090")
    expect(page.locator('.entry[aria-pressed="true"]')).to_have_count(1)
    expect(detail.locator(".device").first).to_contain_text("free")
    page.click("#models-settings button")
    page.locator("#models-settings input[type=number]").first.fill("4096")
    expect(detail).to_contain_text("4,096 tokens, as asked for")
    files = page.locator("#models-files")
    files.locator(".pick", has_text="IQ4_XS").click()
    expect(detail.locator(".pill")).to_contain_text("IQ4_XS")
    files.locator('button[data-act="download"]').first.focus()
    page.keyboard.press("Enter")
    expect(files).to_contain_text("Its licence is Llama 3.1 Community License")
    # Whoever uses the keyboard goes on where the button was, though all of it was drawn anew.
    assert page.evaluate("document.activeElement.dataset.act") == "download-yes"
    files.get_by_text("No", exact=True).click()
    expect(files).not_to_contain_text("Its licence is Llama")
    site.service.in_memory = [LoadedModel("fake", "CPU", 8192, 4, 0, 1 << 30, 0, None)]
    row = page.locator("#models-now .now-row")
    expect(row).to_contain_text("loaded on CPU")
    page.get_by_role("button", name="Unload fake").click()  # above a long list it has its room, too
    expect(row).to_have_count(0)
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator("#models-list")).not_to_be_visible()
    page.get_by_text("All models").click()
    expect(page.locator("#models-list .entry").first).to_be_visible()
    page.click("#nav-chat")
    expect(page.locator("#composer")).to_be_visible()


def test_hardware_and_a_card_that_is_lost(site: Site, tab: Tab) -> None:
    on(site, "lost-gpu")
    page = tab.page
    page.click("#nav-hardware")
    machine = page.locator("#hardware-machine")
    expect(machine.locator(".card")).to_have_count(3)
    expect(machine.locator(".card.lost")).to_contain_text("fallen off the bus")
    expect(machine.locator(".card").first).to_contain_text("48.0 GiB")
    expect(machine.locator(".card").first.locator(".shares")).to_contain_text("0.6 GiB")
    expect(machine.locator(".card").last.locator(".plot").first).to_be_visible()  # once there are samples
    assert page.get_attribute("#nav-hardware", "aria-current") == "page"
    page.click("#nav-chat")


def test_a_first_start_proposes_a_model(site: Site, tab: Tab) -> None:
    on(site, "rtx-4090")
    page = tab.page
    page.reload()
    tab.ready()
    expect(page.locator("#proposal .proposal")).to_contain_text("would run well here")
    page.locator("#proposal").get_by_text("Others", exact=True).click()
    expect(page.locator("#models-list .entry").first).to_be_visible()
    page.click("#nav-chat")
    page.locator("#proposal").get_by_text("Not now", exact=True).click()
    expect(page.locator("#proposal .proposal")).to_have_count(0)
    tab.ask("Hello?")  # the starter answers all the while
    assert tab.answers[-1] == "Hello there."
