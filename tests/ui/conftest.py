"""A page on a real port over fakes, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio
import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

from nemolocal.ui import app
from tests.fakes import FakeService, FakeTextModel

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
]


class Site:
    """The served page. `service.model` and the rest of the service may be changed by a test."""

    def __init__(self, service: FakeService, address: str) -> None:
        self.service = service
        self.address = address

    @property
    def model(self) -> FakeTextModel:
        return self.service.model


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One server for all tests, since drawing the page takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMOLOCAL_HOME", str(tmp_path_factory.mktemp("page")))
        service = FakeService()
    _ = anyio.open_file  # imported on first use, which must not be in the server's thread: Python 3.11
    # cannot parse two sources at once, and pytest parses what it imports.
    page = app.page(service)
    server = uvicorn.Server(uvicorn.Config(page, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Site(service, f"http://127.0.0.1:{port}/")
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def site(served: Site) -> Iterator[Site]:
    """The served page with a model, a status and a list of models of the test's own."""
    before = dict(vars(served.service))
    served.service.model = FakeTextModel()
    yield served
    vars(served.service).clear()
    vars(served.service).update(before)


def find_browser() -> str:
    """The browser to drive. Skips where there is none, but not in CI."""
    chosen = os.environ.get("NEMOLOCAL_TEST_BROWSER")
    found = chosen or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        message = "no Chromium, Chrome or Edge was found; name one in NEMOLOCAL_TEST_BROWSER"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module. Not for the session: while it is there, other tests could run no event
    loop of their own."""
    path = find_browser()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield chromium
        chromium.close()


class Tab:
    """The page in a browser's tab, as a person handles it. `foreign` holds what it asked of other hosts."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.foreign: list[str] = []
        self.faults: list[str] = []
        page.on("request", self._look_at)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.set_default_timeout(10_000)

    def _look_at(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(self.address).netloc:
            self.foreign.append(request.url)

    def open(self) -> None:
        self.page.goto(self.address)
        self.ready()
        expect(self.page.locator("#status .state")).to_be_visible()
        # The page is filled by an event of its own once it is drawn.
        expect(self.page.locator("#model-picker input")).not_to_have_value("")

    def ready(self) -> None:
        """Wait until nothing is being answered."""
        expect(self.page.locator("#composer .submit-button")).to_be_visible()

    def type(self, text: str) -> None:
        self.page.fill("#composer textarea", text)
        self.page.press("#composer textarea", "Enter")

    def ask(self, text: str) -> None:
        """Send a message and wait for the end of its answer."""
        n_before = self.page.locator("#messages .user-row").count()
        self.type(text)
        expect(self.page.locator("#messages .user-row")).to_have_count(n_before + 1)
        self.ready()
        self.page.wait_for_timeout(100)

    @property
    def questions(self) -> list[str]:
        return [text.strip() for text in self.page.locator("#messages .user-row").all_inner_texts()]

    @property
    def answers(self) -> list[str]:
        """What was answered, without the line of figures below it."""
        texts = []
        for row in self.page.locator("#messages .bot-row").all():
            text = row.inner_text().strip()
            for line in row.locator("small").all_inner_texts():
                text = text.removesuffix(line).strip()
            texts.append(text)
        return texts

    @property
    def figures(self) -> list[str]:
        """The lines below the answers that say what they took."""
        return self.page.locator("#messages .bot-row small").all_inner_texts()

    def act(self, name: str) -> None:
        """Press one of the buttons at the last message that has it."""
        button = self.page.locator(f'#messages button[aria-label="{name}"]').last
        expect(button).to_be_enabled()
        button.click(force=True)


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One profile for a module, so that the page's scripts are loaded only once."""
    made = browser.new_context(
        viewport={"width": 1100, "height": 760}, permissions=["clipboard-read", "clipboard-write"]
    )
    yield made
    made.close()


@pytest.fixture
def tab(site: Site, context: BrowserContext) -> Iterator[Tab]:
    """The open page with an empty conversation. One page serves a module's tests, since to open it takes a
    second and a half. For every test holds: it asks nothing of other hosts, and its script has no fault."""
    ours = [page for page in context.pages if page.url.startswith(site.address)]
    opened = Tab(ours[0] if ours else context.new_page(), site.address)
    opened.page.bring_to_front()
    if ours:
        opened.page.click("#new-chat")
        expect(opened.page.locator("#messages .placeholder")).to_be_visible()
        opened.page.fill("#composer textarea", "")
    else:
        opened.open()
    yield opened
    for other in context.pages:
        if other is not opened.page:
            other.close()
    if not opened.page.is_closed():
        opened.page.evaluate("localStorage.clear(); document.body.classList.remove('dark', 'settings-open')")
        opened.page.set_viewport_size({"width": 1100, "height": 760})
    assert opened.foreign == []
    assert opened.faults == []
