"""Nothing that a model, a person, a name or an error says runs in the page or calls another host. Shown
without the port's content security policy, so that the page holds by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, Route, expect

from nemolocal.api.security import PAGE_POLICY
from nemolocal.errors import EngineError
from tests.fakes import FakeTextModel
from tests.ui.conftest import Site, Tab

pytestmark = pytest.mark.browser


class Trap:
    """A port that counts who calls. Payloads point at it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.calls = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            try:
                self.socket.accept()[0].close()
            except OSError:
                return
            self.calls += 1


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.socket.shutdown(socket.SHUT_RDWR)
    made.socket.close()


def payloads(host: str) -> list[str]:
    return [
        '<img src=x onerror="window.__x=1">',
        "<script>window.__x=2</script>",
        "[click](javascript:window.__x=3)",
        "[tab](java\tscript:window.__x=4) [entity](&#106;avascript:window.__x=5) <javascript:window.__x=6>",
        "<svg onload=window.__x=7><image href=http://HOST/svg /></svg>",
        "![image](http://HOST/leak?q=1) ![ref][r]\n\n[r]: http://HOST/ref",
        '<iframe src="http://HOST/frame"></iframe><object data="http://HOST/o"></object>',
        "[data](data:text/html,<script>window.__x=8</script>)",
        '<div style="background:url(http://HOST/css)">styled</div><style>@import "http://HOST/s";</style>',
        '<link rel="stylesheet" href="http://HOST/l"><meta http-equiv="refresh" content="0;url=http://HOST/m">',
        '<video src="http://HOST/v" autoplay></video><audio src=http://HOST/a></audio>',
        "para\n      ```\n<img src=http://HOST/lazy onerror=window.__x=9>\n",
        "```html\n<img src=http://HOST/code onerror=window.__x=10>\n```",
        '```mermaid\ngraph TD; A["<img src=http://HOST/mermaid>"]-->B@{ img: "http://HOST/m2" }\n```',
        "$$\\href{javascript:window.__x=11}{x} \\includegraphics{http://HOST/tex} <img src=http://HOST/t2>$$",
        "%%%LATEX_BLOCK_0%%% <form action=http://HOST/f><button>go</button></form>",
        "<details open ontoggle=window.__x=12><summary>s</summary></details>",
    ]


def hostile(host: str) -> str:
    return "\n\n".join(payloads(host)).replace("HOST", host)


def assert_unharmed(tab: Tab, trap: Trap) -> None:
    tab.page.wait_for_timeout(400)
    assert tab.page.evaluate("window.__x") is None
    assert trap.calls == 0
    assert tab.foreign == []
    forbidden = ":is(img, iframe, object, embed, script, style, link, meta, video, audio, form, .mermaid)"
    everywhere = ", ".join(
        f"{part} {forbidden}" for part in ("#messages .prose", "#notice", "#status", "#header")
    )
    found = tab.page.locator(everywhere).evaluate_all("(all) => all.map((e) => e.outerHTML)")
    assert found == []
    links = tab.page.evaluate(
        "[...document.querySelectorAll('#messages a')].map((a) => a.getAttribute('href'))"
    )
    assert [link for link in links if link and link.split(":")[0] not in ("http", "https", "mailto")] == []


def test_what_a_model_and_a_person_write_stays_text(site: Site, tab: Tab, trap: Trap) -> None:
    text = hostile(trap.host)
    site.service.model = FakeTextModel([text[i : i + 7] for i in range(0, len(text), 7)])
    site.model.delay_s = 0.004
    tab.ask(text)
    for link in tab.page.locator("#messages a").all():
        if (link.get_attribute("href") or "").startswith(("http:", "https:", "mailto:")):
            assert link.get_attribute("target") == "_blank"
            assert "noopener" in (link.get_attribute("rel") or "")
        else:
            link.evaluate("(dead) => dead.click()")
    assert_unharmed(tab, trap)
    for shown in (tab.questions[0], tab.answers[0]):
        visible = shown.replace("\u2060", "")
        assert '<img src=x onerror="window.__x=1">' in visible
        assert "<script>window.__x=2</script>" in visible
        assert f'<iframe src="http://{trap.host}/frame">' in visible
    tab.page.reload()
    expect(tab.page.locator("#messages .bot-row")).to_contain_text("window.__x=1")
    assert_unharmed(tab, trap)


def test_what_is_exported_stays_text(site: Site, tab: Tab, trap: Trap, tmp_path: Path) -> None:
    site.service.model = FakeTextModel([hostile(trap.host)])
    tab.ask(hostile(trap.host))
    with tab.page.expect_download() as waiting:
        tab.page.click("#export")
    waiting.value.save_as(tmp_path / "chat.md")
    reader = tab.page.context.new_page()
    reader.goto((tmp_path / "chat.md").as_uri())
    reader.wait_for_timeout(200)
    assert reader.evaluate("window.__x") is None
    exported = (tmp_path / "chat.md").read_text(encoding="utf-8")
    assert '\\<img src=x onerror="window.__x=1">' in exported
    assert trap.calls == 0


def test_names_and_errors_stay_text(site: Site, tab: Tab, trap: Trap) -> None:
    bad = f'<img src=http://{trap.host}/name onerror="window.__x=1">![i](http://{trap.host}/md)'
    card = replace(site.service.list_models()[0], name=bad)
    site.service.list_models = lambda: [card]  # type: ignore[method-assign]
    site.service.current = replace(site.service.current, model=bad, device=bad)
    site.model.refusal = EngineError(f"Broken: {bad}", hint=f"[x](javascript:window.__x=2) {bad}")
    tab.page.reload()
    tab.ready()
    tab.ask("Hello?")
    expect(tab.page.locator("#notice")).to_contain_text("Broken: <img src=")
    expect(tab.page.locator("#status")).to_contain_text("<img src=")
    tab.page.click("#model-picker input")
    expect(tab.page.get_by_role("option").first).to_contain_text("<img src=")
    assert_unharmed(tab, trap)


def test_ordinary_markdown_looks_right_while_it_comes_and_after(site: Site, tab: Tab) -> None:
    text = (
        "# Title\n\nSome **bold** text, a < b && c > d, 🎉 and `x <y> & z`.\n\n"
        "| a | b |\n|---|--:|\n| 1 | <2> |\n\n"
        '```html\n<p class="x">&amp; 1 < 2</p>\n```\n\n'
        "1. one\n   ```sh\n   echo $$ <in\n   ```\n2. two\n\n"
        "Inline \\(a<b\\) and $x^2$, costs $5 or $6.\n\n$$\\frac{1}{2}$$\n\n[link](https://example.com)\n"
    )
    site.service.model = FakeTextModel([text[i : i + 5] for i in range(0, len(text), 5)])
    site.model.delay_s = 0.01
    tab.type("Show me.")
    answer = tab.page.locator("#messages .bot-row .prose").first
    expect(answer.locator("h1")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    assert tab.page.locator("#composer .stop-button").is_visible()
    tab.ready()
    plain = answer.inner_text().replace("\u2060", "")
    assert "a < b && c > d, 🎉 and x <y> & z." in plain
    assert "costs $5 or $6." in plain
    assert answer.locator("td").last.inner_text().replace("\u2060", "") == "<2>"
    blocks = [code.replace("\u2060", "").strip() for code in answer.locator("pre code").all_inner_texts()]
    assert blocks == ['<p class="x">&amp; 1 < 2</p>', "echo $$ <in"]
    assert answer.locator("li").count() == 2
    assert answer.locator(".katex").count() == 3
    assert answer.locator(".katex-error").count() == 0
    assert answer.locator("a").get_attribute("href") == "https://example.com"


def test_the_page_works_under_the_ports_policy(site: Site, context: BrowserContext) -> None:
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)

    def with_policy(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, headers={**answer.headers, "content-security-policy": PAGE_POLICY})

    page.route(lambda url: url.startswith(site.address) and "gradio_api" not in url, with_policy)
    tab = Tab(page, site.address)
    tab.open()
    tab.ask("Hello?")
    assert tab.answers == ["Hello there."]
    assert complaints == []
    assert tab.faults == []


def test_the_page_takes_no_files(site: Site) -> None:
    answer = httpx.post(f"{site.address}gradio_api/upload", files={"files": ("x.txt", b"some text")})
    assert answer.status_code == 413
