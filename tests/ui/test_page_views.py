"""The Models and Hardware tabs in a real browser, on described machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from nemolocal.errors import EngineError
from nemolocal.hardware import load_profile
from nemolocal.service import LoadedModel
from nemolocal.shelf import Shelf
from nemolocal.types import TextModel
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
    settings = page.locator("#models-settings")
    page.fill("#models-words textarea, #models-words input", "llama")
    expect(page.locator("#models-list .entry").first).to_contain_text("Llama")
    page.click('.entry[data-ref="llama-3.1-nemotron-70b"]')
    detail = page.locator("#models-detail")
    expect(detail.locator("h2")).to_have_text("Llama 3.1 Nemotron 70B Instruct")
    expect(detail.locator(".device")).to_have_count(3)  # two cards and the RAM
    expect(detail.locator(".device").first).to_contain_text("RTX 3090")
    expect(page.locator('.entry[aria-pressed="true"]')).to_have_count(1)
    expect(detail.locator(".device").first).to_contain_text("free")
    expect(settings.locator("input").first).not_to_be_visible()
    files_box, settings_box = page.locator("#models-files").bounding_box(), settings.bounding_box()
    assert files_box
    assert settings_box
    assert settings_box["y"] >= files_box["y"] + files_box["height"]
    page.click("#models-settings button")
    page.locator("#models-settings input[type=number]").first.fill("4096")
    expect(detail).to_contain_text("4,096 tokens, as asked for")
    files = page.locator("#models-files")
    files.locator(".pick", has_text="IQ4_XS").click()
    expect(detail.locator(".pill")).to_contain_text("IQ4_XS")
    files.locator('button[data-act="download"]').first.focus()
    page.keyboard.press("Enter")
    expect(files).to_contain_text("Its licence: Llama 3.1 Community License")
    heads = files.locator("thead th").evaluate_all("all => all.map(each => each.offsetHeight)")
    assert max(heads) < 40  # a long question breaks no word of the columns
    # Whoever uses the keyboard goes on where the button was, though all of it was drawn anew.
    assert page.evaluate("document.activeElement.dataset.act") == "download-yes"
    files.get_by_text("No", exact=True).click()
    expect(files).not_to_contain_text("Its licence: Llama")
    site.service.in_memory = [LoadedModel("fake", "CPU", 8192, 4, 0, 1 << 30, 0, None)]
    row = page.locator("#models-now .now-row")
    expect(row).to_contain_text("loaded on CPU")
    page.get_by_role("button", name="Unload fake").click()  # above a long list it has its room, too
    expect(row).to_have_count(0)
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator("#models-list")).not_to_be_visible()
    assert files.locator("caption").evaluate("each => each.offsetHeight") < 40
    page.get_by_text("All models").click()
    expect(page.locator("#models-list .entry").first).to_be_visible()
    page.click("#nav-chat")
    expect(page.locator("#composer")).to_be_visible()


def test_before_a_model_is_chosen(site: Site, tab: Tab) -> None:
    on(site, "2x-rtx-3090")
    page = tab.page
    page.reload()
    tab.ready()
    page.click("#nav-models")
    expect(page.locator("#models-list .entry").first).to_be_visible()
    expect(page.locator("#models-settings")).not_to_be_visible()  # there is nothing to be loaded yet
    page.fill("#models-import textarea, #models-import input", "/no/such.gguf")
    page.click("#models-import button")
    expect(page.locator("#models-added")).to_contain_text("There is no such file")
    expect(page.locator("#models-added")).to_be_in_viewport()
    page.click("#nav-chat")


def test_hardware_and_a_card_that_is_lost(site: Site, tab: Tab) -> None:
    on(site, "lost-gpu")
    page = tab.page
    page.click("#nav-hardware")
    machine = page.locator("#hardware-machine")
    expect(machine.locator(".card")).to_have_count(3)
    for width in (1100, 1500, 2200):
        page.set_viewport_size({"width": width, "height": 760})
        lefts = machine.locator(".machine > *").evaluate_all(
            "all => all.map(each => Math.round(each.getBoundingClientRect().left))"
        )
        assert len(lefts) > 1
        assert len(set(lefts)) == 1
    expect(machine.locator(".card.lost")).to_contain_text("fallen off the bus")
    expect(machine.locator(".card").first).to_contain_text("48.0 GiB")
    expect(machine.locator(".card").first.locator(".shares")).to_contain_text("0.6 GiB")
    expect(machine.locator(".card").last.locator(".plot").first).to_be_visible()  # once there are samples
    assert page.get_attribute("#nav-hardware", "aria-current") == "page"
    page.click("#nav-chat")


def test_one_card_has_the_whole_width(site: Site, tab: Tab) -> None:
    on(site, "laptop-16gb")
    page = tab.page
    page.click("#nav-hardware")
    card = page.locator("#hardware-machine .card")
    expect(card).to_have_count(1)
    expect(card).to_contain_text("other programs")
    width = page.locator("#hardware-machine .machine").evaluate("each => each.clientWidth")
    assert card.evaluate("each => each.offsetWidth") == width
    page.click("#nav-chat")


def test_a_load_that_fails_leaves_nothing_to_copy(site: Site, tab: Tab) -> None:
    def refuse(ref: str | None) -> TextModel:
        raise EngineError("The driver is gone.", hint="Reboot, or plan with --gpu-layers 0.")

    page, find_model = tab.page, site.service.find_model
    site.service.find_model = refuse  # type: ignore[method-assign]
    tab.ask("Hello?")
    expect(page.locator("#notice")).to_contain_text(
        "plan with “Layers on the GPUs” 0. That is on the Models tab"
    )
    assert tab.answers == ["No answer."]
    expect(page.locator('#messages .bot-row + .message-buttons [aria-label="Retry"]')).to_be_visible()
    expect(page.locator('#messages .bot-row + .message-buttons [aria-label="Copy message"]')).to_be_hidden()
    site.service.find_model = find_model  # type: ignore[method-assign]
    tab.ask("And now?")
    expect(
        page.locator('#messages .bot-row + .message-buttons [aria-label="Copy message"]').last
    ).to_be_visible()


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
