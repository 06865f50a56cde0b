"""The whole page: its header, its tabs and what surrounds them. `build` draws it, `page` makes it an ASGI
app for the port. Must not know the port."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

# Before gradio is imported, which reads them. Nothing of this page is ever reported to anyone, and no table
# of timings is worked out after each event, for which gradio would load pandas.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = "1000000000"

import gradio as gr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nemolocal import config
from nemolocal.service import Service
from nemolocal.ui import chat, documents, hardware, models, picker, settings, start, uploads
from nemolocal.ui.conversation import to_markdown
from nemolocal.ui.tabs import Tabs
from nemolocal.ui.theme import theme
from nemolocal.ui.works import Works

TITLE = "NemoLocal"


def build(service: Service, tabs: Tabs | None = None, back: documents.Back | None = None) -> gr.Blocks:
    """Draw the page and wire it. `tabs` is what the server remembers of the open tabs, `back` what it does
    with documents beside them."""
    works = Works()
    blocks = gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True, fill_width=True)
    with blocks:
        with gr.Row(elem_id="header"):
            gr.Markdown(f"# {TITLE}", elem_id="brand", container=False)
            chosen = picker.build()
            new = gr.Button("New chat", elem_id="new-chat", min_width=40)
            # These three are the browser's own business: assets/page.js answers them.
            gr.Button("Export as Markdown", elem_id="export", min_width=40)
            gr.Button("Light or dark", elem_id="shade", min_width=40)
            gr.Button("Settings", elem_id="settings-toggle", min_width=40)
            with gr.Row(elem_id="nav"):  # page.js shows one view at a time
                to_chat = gr.Button("Chat", elem_id="nav-chat", min_width=40)
                to_documents = gr.Button("Documents", elem_id="nav-documents", min_width=40)
                to_models = gr.Button("Models", elem_id="nav-models", min_width=40)
                to_hardware = gr.Button("Hardware", elem_id="nav-hardware", min_width=40)
        with gr.Row(elem_id="body"):
            main = gr.Column(elem_id="main")
            with gr.Column(elem_id="settings"):
                panel = settings.build()
            with main:
                start.build(service, works, blocks, chosen)
                opened = chat.build(service, tabs or Tabs(), chat.Shared(blocks, chosen, new, panel.fields))
        with gr.Column(elem_id="documents-view", elem_classes="view"):
            timers = [documents.build(service, back or documents.back_of(service), to_documents, chosen)]
        with gr.Column(elem_id="models-view", elem_classes="view"):
            timers.append(models.build(service, works, to_models, chosen))
        with gr.Column(elem_id="hardware-view", elem_classes="view"):
            timers.append(hardware.build(service, to_hardware))
        for button, seen in zip(
            (to_chat, to_documents, to_models, to_hardware), (None, *timers), strict=True
        ):
            # Only what is seen looks at anything again and again.
            switched = [gr.Timer(active=timer is seen) for timer in timers]
            button.click(partial(list, switched), None, timers, queue=False, api_visibility="private")
        settings.wire(service, panel, chosen, opened.then)
    return blocks


def page(service: Service) -> ASGIApp:
    """The page as one ASGI app, with a lifespan that its host must run. To be called where no event loop
    runs, such as in a thread of its own."""

    async def made() -> ASGIApp:
        return _mounted(service, Tabs())

    # Wherever gradio finds no running event loop while it draws, it leaves a new one behind, open.
    return asyncio.run(made())


def _mounted(service: Service, tabs: Tabs) -> ASGIApp:
    async def export(request: Request) -> Response:
        text = to_markdown(tabs.recall(request.query_params.get("tab", "")))
        headers = {"Content-Disposition": 'attachment; filename="conversation.md"'}
        return Response(text, media_type="text/markdown; charset=utf-8", headers=headers)

    back = documents.back_of(service)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await back.close()

    parent = Starlette(routes=[Route("/chat.md", export), *uploads.routes(back)], lifespan=life)
    gr.mount_gradio_app(
        parent,
        build(service, tabs, back),
        path="/",
        theme=theme(),
        head=_head(),
        favicon_path=str(config.resource("assets/icon.png")),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        show_error=False,
        max_file_size=0,
    )
    return parent


def _head() -> str:
    """What goes into the page's head: the style sheet with the icon in it, and the script for all that needs
    no server. Gradio's own parameter for style sheets would rewrite their selectors."""
    icon = base64.b64encode(config.resource("assets/icon.svg").read_bytes()).decode()
    style = config.resource("assets/style.css").read_text(encoding="utf-8")
    script = config.resource("assets/page.js").read_text(encoding="utf-8")
    root = f':root {{ --icon: url("data:image/svg+xml;base64,{icon}"); }}'
    return f"<style>{root}\n{style}</style><script>{script}</script>"
