"""`/v1/embeddings`: texts, or token ids, to vectors of length 1. Nothing is put before an input: prefixes
such as "query: " are the caller's."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

import pydantic_core
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from nemolocal.api import body
from nemolocal.api.body import Schema
from nemolocal.api.connection import while_connected
from nemolocal.api.openai.fields import as_seconds
from nemolocal.api.openai.prompts import as_prompts
from nemolocal.errors import InvalidRequestError
from nemolocal.service import Service
from nemolocal.vectors import Vectors, floats

N_INPUTS = 2048

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    asked = await body.read(request, EmbeddingsRequest)
    service: Service = request.app.state.service
    model = service.find_embedder(asked.model or None, keep_alive_s=asked.keep_alive)
    work = model.embed(asked.input, n_dimensions=asked.dimensions)
    try:
        vectors = await while_connected(request, work)
    except InvalidRequestError as error:
        if error.param == "input[0]" and len(asked.input) == 1:
            error.param = "input"
        raise
    content = await asyncio.to_thread(_render, vectors, model.id, asked.encoding_format)
    return Response(content, media_type="application/json")


def _as_inputs(value: Any) -> list[str | tuple[int, ...]]:
    inputs = as_prompts(value)
    if len(inputs) > N_INPUTS:
        raise PydanticCustomError("input", f"may hold at most {N_INPUTS} inputs")
    if not all(inputs):
        raise PydanticCustomError("input", "must not hold an empty text")
    return inputs


class EmbeddingsRequest(Schema):
    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Annotated[list[str | tuple[int, ...]], BeforeValidator(_as_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    keep_alive: Annotated[float, BeforeValidator(as_seconds)] | None = None


def _render(vectors: Vectors, model_id: str, encoding: Literal["float", "base64"] | None) -> bytes:
    """The answer as JSON; thousands of vectors are megabytes of it."""

    def shown(vector: bytes) -> str | list[float]:
        return base64.b64encode(vector).decode() if encoding == "base64" else floats(vector).tolist()

    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": shown(vector)}
            for index, vector in enumerate(vectors.values)
        ],
        "model": model_id,
        "usage": {"prompt_tokens": vectors.prompt_tokens, "total_tokens": vectors.prompt_tokens},
    }
    return pydantic_core.to_json(content)
