"""`/v1/rerank`: which of these documents answer the query best, in the shape that Jina and Cohere gave it."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse

from nemolocal.api import body
from nemolocal.api.body import Schema
from nemolocal.api.connection import while_connected
from nemolocal.api.openai.fields import as_seconds
from nemolocal.service import Service
from nemolocal.vectors import Scores

N_DOCUMENTS = 2048

router = APIRouter()


@router.post("/v1/rerank")
async def rerank(request: Request) -> JSONResponse:
    asked = await body.read(request, RerankRequest)
    service: Service = request.app.state.service
    model = service.find_reranker(asked.model or None, keep_alive_s=asked.keep_alive)
    scores = await while_connected(request, model.rank(asked.query, asked.documents))
    return JSONResponse(answer(asked, scores, model.id))


def _as_documents(value: Any) -> list[str]:
    """Texts, or objects with a `text`, in any mixture."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("documents", "must be a list of texts that is not empty")
    if len(value) > N_DOCUMENTS:
        raise PydanticCustomError("documents", f"may hold at most {N_DOCUMENTS} documents")
    texts = [entry.get("text") if isinstance(entry, dict) else entry for entry in value]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) != len(texts):
        raise PydanticCustomError("documents", "must be texts, or objects with a text")
    return found


class RerankRequest(Schema):
    model: Annotated[str, Field(max_length=1024)] | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str], BeforeValidator(_as_documents)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    keep_alive: Annotated[float, BeforeValidator(as_seconds)] | None = None


def answer(asked: RerankRequest, scores: Scores, model_id: str) -> dict[str, Any]:
    """The best `top_n` documents, the best first; of equal ones, in their own order."""
    order = sorted(range(len(scores.values)), key=lambda index: (-scores.values[index], index))
    results = []
    for index in order[: asked.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores.values[index]}
        if asked.return_documents:
            result["document"] = {"text": asked.documents[index]}
        results.append(result)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": model_id,
        "results": results,
        "usage": {"prompt_tokens": scores.prompt_tokens, "total_tokens": scores.prompt_tokens},
    }
