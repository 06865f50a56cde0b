"""Where the page's script sends the documents that were chosen or dropped, and where a summary is fetched as
a file. Gradio's own upload would keep each file in a folder that the page can read from."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nemolocal.ui.documents import Back

N_NAME: Final = 1_000
"""Letters of a file's name that are looked at."""
PROBLEMS: Final = {
    "folder": "It is a folder. Add the files in it.",
    "kind": "This kind of file is not read here.",
    "lost": "It did not arrive. Try it again.",
}
"""Why a file was not sent, as the script tells it."""


def routes(back: Back) -> list[Route]:
    async def add(request: Request) -> Response:
        query = request.query_params
        tab, name = query.get("tab", ""), query.get("name", "")[:N_NAME]
        if not tab or not name:
            return PlainTextResponse("A document needs a tab and a name.", 400)
        room = back.rooms.of(tab)
        batch = query.get("batch", "")[:64]
        if problem := query.get("problem"):
            back.intake.refuse(room, name, PROBLEMS.get(problem, PROBLEMS["lost"]), batch=batch)
            return Response(status_code=204)
        size = query.get("size", "")
        n_bytes = int(size) if size.isdecimal() and len(size) < 16 else 0
        try:
            is_taken = await back.intake.receive(room, name, request.stream(), n_bytes=n_bytes, batch=batch)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(status_code=204 if is_taken else 415)

    async def summary(request: Request) -> Response:
        summing = back.rooms.of(request.query_params.get("tab", "")).summing
        if summing is None or not summing.made:
            return PlainTextResponse("There is no summary.", 404)
        first = PurePath(summing.documents[0][1]).stem or "document"
        name = f"{first}.summary.md" if len(summing.documents) == 1 else "summaries.md"
        coded = quote(name, safe="")
        headers = {"Content-Disposition": f"attachment; filename=\"summary.md\"; filename*=UTF-8''{coded}"}
        return Response(summing.markdown(), media_type="text/markdown; charset=utf-8", headers=headers)

    return [Route("/documents/add", add, methods=["POST"]), Route("/summary.md", summary)]
