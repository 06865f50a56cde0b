"""The page in a real browser: what a person does, and what they see."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from nemolocal.errors import EngineDiedError
from nemolocal.service import Status
from nemolocal.types import Message
from tests.fakes import FakeTextModel
from tests.ui.conftest import Site, Tab

pytestmark = pytest.mark.browser


def until(condition: Callable[[], bool], page: Page, *, seconds: float = 5.0) -> None:
    """Wait for something on the server's side, while the browser goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        page.wait_for_timeout(20)


def slow(site: Site, *, n_pieces: int = 400, delay_s: float = 0.02) -> FakeTextModel:
    site.service.model = FakeTextModel([f"word{n} " for n in range(n_pieces)])
    site.model.delay_s = delay_s
    return site.model


def test_an_empty_page_offers_prompts_and_sends_one_on_a_click(site: Site, tab: Tab) -> None:
    expect(tab.page).to_have_title("NemoLocal")
    expect(tab.page.locator("#messages .placeholder")).to_contain_text("What shall we work on?")
    tab.page.click("#messages .example >> nth=0")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("Hello there.")
    ((messages, _),) = site.model.calls
    assert messages[-1].role == "user"
    assert "large language model" in messages[-1].content


def test_an_answer_streams_in_and_the_status_line_counts(site: Site, tab: Tab) -> None:
    slow(site, n_pieces=30, delay_s=0.05)
    tab.type("How are you today?")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word3")
    assert "word29" not in tab.answers[0]
    expect(tab.page.locator("#status .state")).to_have_text("Writing")
    tab.ready()
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word29")
    status = tab.page.locator("#status")
    expect(status).to_contain_text("fake")
    expect(status).to_contain_text("CPU")
    expect(status).to_contain_text("34 of 8,192 tokens")
    expect(status).to_contain_text("tokens/s")
    expect(tab.page.locator("#composer textarea")).to_have_value("")


def test_shift_enter_makes_a_new_line_and_enter_sends(site: Site, tab: Tab) -> None:
    box = tab.page.locator("#composer textarea")
    box.click()
    box.press_sequentially("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.press("Enter")
    expect(tab.page.locator("#messages .bot-row")).to_have_count(1)
    assert site.model.calls[0][0][-1].content == "one\ntwo"


def test_stop_keeps_the_text_and_frees_the_model(site: Site, tab: Tab) -> None:
    model = slow(site)
    tab.type("Count, please.")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word5")
    tab.page.click("#composer .stop-button")
    tab.ready()
    until(lambda: model.n_closed_early == 1, tab.page)
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("Stopped.")
    assert "word5" in tab.answers[0]
    assert "word399" not in tab.answers[0]
    site.service.model = FakeTextModel(["Fine."])
    tab.ask("And now?")
    assert tab.answers[1] == "Fine."
    history = site.model.calls[0][0]
    assert [m.role for m in history] == ["user", "assistant", "user"]
    assert "word5" in history[1].content
    assert "Stopped" not in history[1].content


def test_closing_the_tab_frees_the_model(site: Site, tab: Tab) -> None:
    model = slow(site)
    tab.type("Count, please.")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word2")
    spare = tab.page.context.new_page()
    tab.page.close()
    until(lambda: model.n_closed_early == 1, spare)


def test_closing_the_tab_before_the_first_word_frees_the_model(site: Site, tab: Tab) -> None:
    site.model.read_delay_s = 60
    tab.type("A very long prompt.")
    expect(tab.page.locator("#status .state")).to_have_text("Reading")
    spare = tab.page.context.new_page()
    tab.page.close()
    until(lambda: site.model.n_closed_early == 1, spare)


def test_retry_answers_the_last_question_again(site: Site, tab: Tab) -> None:
    tab.ask("First?")
    site.service.model = FakeTextModel(["Second try."])
    tab.ask("Second?")
    site.service.model = FakeTextModel(["Third try."])
    tab.act("Retry")
    expect(tab.page.locator("#messages .bot-row").last).to_contain_text("Third try.")
    tab.ready()
    assert tab.questions == ["First?", "Second?"]
    assert tab.answers == ["Hello there.", "Third try."]
    assert [m.content for m in site.model.calls[0][0]] == ["First?", "Hello there.", "Second?"]


def test_edit_asks_anew_and_drops_what_came_after(site: Site, tab: Tab) -> None:
    tab.ask("Is 1 <b>?")
    tab.ask("Second?")
    site.service.model = FakeTextModel(["Anew."])
    tab.page.locator('#messages button[aria-label="Edit"]').first.click(force=True)
    box = tab.page.locator("#messages .user-row textarea")
    box.press("End")
    box.press_sequentially(" Or 2?")
    tab.page.locator('#messages button[aria-label="Submit"]').click(force=True)
    expect(tab.page.locator("#messages .bot-row").last).to_contain_text("Anew.")
    tab.ready()
    assert tab.answers == ["Anew."]
    assert site.model.calls[0][0] == (Message("user", "Is 1 <b>? Or 2?"),)


def test_undo_brings_the_question_back_into_the_composer(site: Site, tab: Tab) -> None:
    tab.ask("First?")
    tab.ask("Second?")
    tab.act("Undo")
    expect(tab.page.locator("#composer textarea")).to_have_value("Second?")
    assert tab.questions == ["First?"]
    assert tab.answers == ["Hello there."]


def test_new_chat_ends_the_answer_and_empties_the_page(site: Site, tab: Tab) -> None:
    model = slow(site)
    tab.type("Count, please.")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word2")
    tab.page.click("#new-chat")
    expect(tab.page.locator("#messages .placeholder")).to_be_visible()
    tab.ready()
    until(lambda: model.n_closed_early == 1, tab.page)
    tab.page.wait_for_timeout(300)
    assert tab.questions == []
    site.service.model = FakeTextModel(["Fresh."])
    tab.ask("Hello?")
    assert [m.content for m in site.model.calls[0][0]] == ["Hello?"]


def test_code_is_copied_as_it_was_written(site: Site, tab: Tab) -> None:
    code = 'if a < b and c <d> && "&amp;":\n    vec![1]  # $x$ \\(y\\)'
    site.service.model = FakeTextModel([f"So:\n\n```python\n{code}\n```\n\nwith <b> and $x<y$."])
    tab.ask("Code?")
    expect(tab.page.locator("#messages pre code")).to_contain_text("vec!")
    tab.page.locator("#messages .code_wrap").hover()
    tab.page.click("#messages .copy_code_button")
    tab.page.wait_for_timeout(150)
    assert tab.page.evaluate("navigator.clipboard.readText()").strip() == code
    tab.act("Copy message")
    tab.page.wait_for_timeout(150)
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"So:\n\n```python\n{code}\n```")
    assert "with <b> and $x" in copied
    tab.page.locator("#messages pre code").click(click_count=3)
    tab.page.keyboard.press("Control+c")
    tab.page.wait_for_timeout(150)
    assert "\u2060" not in tab.page.evaluate("navigator.clipboard.readText()")


def test_an_answers_figures_stand_below_it_and_are_not_copied(site: Site, tab: Tab) -> None:
    site.service.model = FakeTextModel(["Written: <small>1 token</small>, ", "and more."])
    site.model.cached_tokens = 1
    tab.ask("Say it.")
    assert tab.answers == ["Written: <\u2060small>1 token<\u2060/small>, and more."]
    assert tab.figures == ["2 tokens · 100.0 tokens/s · 1 of 2 prompt tokens cached"]
    tab.act("Copy message")
    tab.page.wait_for_timeout(150)
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == "Written: <small>1 token</small>, and more."


def test_settings_reach_the_model_and_outlive_a_reload(site: Site, tab: Tab) -> None:
    tab.page.click("#settings-toggle")
    tab.page.fill("#system-prompt textarea", "Be brief.")
    tab.page.fill("#temperature input[type=number]", "0.2")
    tab.page.press("#temperature input[type=number]", "Tab")
    tab.page.fill("#max-tokens input", "2")
    tab.page.fill("#seed input", "7")
    tab.page.press("#seed input", "Tab")
    tab.page.wait_for_timeout(400)
    tab.ask("Hello?")
    messages, params = site.model.calls[0]
    assert messages[0] == Message("system", "Be brief.")
    assert params.sampling.temperature == 0.2
    assert params.sampling.seed == 7
    assert params.max_tokens == 2
    assert "Ended at the longest answer allowed." in tab.answers[0]
    tab.page.reload()
    tab.ready()
    expect(tab.page.locator("#system-prompt textarea")).to_have_value("Be brief.")
    expect(tab.page.locator("#seed input")).to_have_value("7")
    tab.page.click("#reset-settings")
    expect(tab.page.locator("#system-prompt textarea")).to_have_value("")
    expect(tab.page.locator("#temperature input[type=number]")).to_have_value("0.8")


def test_a_reload_brings_the_conversation_back(site: Site, tab: Tab) -> None:
    tab.ask("Do you remember?")
    tab.page.reload()
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("Hello there.")
    assert tab.questions == ["Do you remember?"]


def test_an_error_is_one_line_and_the_page_goes_on(site: Site, tab: Tab) -> None:
    site.model.error = EngineDiedError("The engine's process ended.", hint="Send it again.")
    tab.ask("Hello?")
    expect(tab.page.locator("#notice")).to_have_text("The engine's process ended. Send it again.")
    assert tab.page.locator("#notice").get_attribute("role") == "alert"
    assert tab.answers[0].startswith("Hello")
    assert "Not finished." in tab.answers[0]
    site.service.model = FakeTextModel(["Back again."])
    tab.ask("Hello again?")
    expect(tab.page.locator("#notice")).to_be_hidden()
    assert tab.answers[-1] == "Back again."


def test_two_tabs_are_answered_at_once_and_keep_apart(site: Site, tab: Tab, context: BrowserContext) -> None:
    other = Tab(context.new_page(), site.address)
    other.open()
    slow(site, n_pieces=60, delay_s=0.03)
    tab.type("From one.")
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("word1")
    other.type("From two.")
    expect(other.page.locator("#messages .bot-row")).to_contain_text("word1")
    expect(tab.page.locator("#composer .stop-button")).to_be_visible()
    tab.ready()
    other.ready()
    assert (tab.questions, other.questions) == (["From one."], ["From two."])
    assert "word59" in tab.answers[0]
    assert "word59" in other.answers[0]


def test_the_page_is_drawn_at_most_twenty_times_a_second(site: Site, tab: Tab) -> None:
    slow(site, n_pieces=1500, delay_s=0.001)
    # Each drawing changes the count of tokens, so that the texts seen are the drawings.
    tab.page.evaluate(
        """() => {
            window.seen = new Map();
            const look = () => {
                const text = document.querySelector("#status .status-line")?.textContent;
                if (text && !window.seen.has(text)) window.seen.set(text, performance.now());
            };
            new MutationObserver(look).observe(
                document.querySelector("#status"), {childList: true, subtree: true, characterData: true}
            );
        }"""
    )
    tab.ask("Fast!")
    times = tab.page.evaluate("[...window.seen.values()]")
    assert len(times) > 10
    assert len(times) <= 20 * (times[-1] - times[0]) / 1000 + 4
    assert "word1499" in tab.answers[0]


def test_choosing_a_model_loads_it_and_shows_how_far_it_is(site: Site, tab: Tab) -> None:
    asked: list[str] = []
    site.service.on_load = asked.append
    card = site.service.list_models()[0]
    site.service.list_models = lambda: [card, replace(card, id="other", name="Other")]  # type: ignore[method-assign]
    tab.page.click("#model-picker input")
    tab.page.get_by_role("option", name="Other").click()
    until(lambda: bool(asked), tab.page)
    expect(tab.page.locator("#model-picker input")).to_have_value("Other · Q4_1 · 98 MB")
    site.service.current = Status("loading", model="fake", progress=0.43)
    expect(tab.page.locator("#status .state")).to_have_text("Loading 43%")
    site.service.current = Status("ready", model="fake", device="RTX 4090", n_ctx=4096, progress=1.0)
    expect(tab.page.locator("#status")).to_contain_text("RTX 4090")
    assert asked == ["other"]
    tab.page.reload()
    expect(tab.page.locator("#model-picker input")).to_have_value("Fake · Q4_1 · 98 MB")


def test_the_conversation_is_exported_as_markdown(site: Site, tab: Tab, tmp_path: Path) -> None:
    site.service.model = FakeTextModel(["A list:\n\n- `<b>`\n- <i>not a tag</i>"])
    tab.ask("What is **this**?")
    with tab.page.expect_download() as waiting:
        tab.page.click("#export")
    assert waiting.value.suggested_filename == "conversation.md"
    waiting.value.save_as(tmp_path / "chat.md")
    text = (tmp_path / "chat.md").read_text(encoding="utf-8")
    assert "## Question\n\nWhat is **this**?\n\n## Answer\n\nA list:\n\n- `<b>`\n- \\<i>not a tag" in text


def test_light_and_dark_and_the_settings_work_from_the_keyboard(tab: Tab) -> None:
    tab.page.focus("#shade")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.body.classList.contains('dark')")
    toggle = tab.page.locator("#settings-toggle")
    assert toggle.get_attribute("aria-expanded") == "false"
    toggle.focus()
    tab.page.keyboard.press("Enter")
    assert toggle.get_attribute("aria-expanded") == "true"
    expect(tab.page.get_by_label("System prompt")).to_be_visible()
    tab.page.reload()
    tab.ready()
    assert tab.page.evaluate("document.body.classList.contains('dark')")


def test_every_control_has_a_name(tab: Tab) -> None:
    tab.page.click("#settings-toggle")
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, [role=combobox]")]
            .filter((e) => e.offsetParent && !e.getAttribute("aria-label") && !e.textContent.trim()
                && !e.title && !(e.labels && e.labels.length) && !e.getAttribute("aria-labelledby"))
            .map((e) => e.outerHTML.slice(0, 200))"""
    )
    assert nameless == []


@pytest.mark.parametrize("width", [800, 390])
def test_a_narrow_window_needs_no_sideways_scrolling(site: Site, tab: Tab, width: int) -> None:
    site.service.model = FakeTextModel(["| a | b |\n|---|---|\n| 1 | 2 |\n\n```\n" + "x" * 300 + "\n```\n"])
    tab.page.set_viewport_size({"width": width, "height": 600})
    tab.ask("Wide?")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    for element in ("#settings-toggle", "#composer .submit-button", "#model-picker"):
        box = tab.page.locator(element).bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
