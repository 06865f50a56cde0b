"""`/v1/models`: what can be named in a request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from nemolocal.errors import ModelNotFoundError
from nemolocal.service import ModelCard, Service

router = APIRouter()

CAPABILITIES = {"chat": "completion", "embed": "embedding", "rank": "rerank"}


@router.get("/v1/models")
async def list_models(request: Request) -> JSONResponse:
    service: Service = request.app.state.service
    cards = service.list_models()
    return JSONResponse(
        {
            "object": "list",
            "data": [describe(card) for card in cards],
            "models": [describe_local(card) for card in cards],
        }
    )


@router.get("/v1/models/{id:path}")
async def get_model(request: Request, id: str) -> JSONResponse:
    """One model by its id, or by any reference to it."""
    service: Service = request.app.state.service
    cards = {card.id: card for card in service.list_models()}
    card = cards.get(id) or cards.get(service.find_model(id).id)
    if card is None:
        raise ModelNotFoundError("This model is not among those of this machine.", hint="See GET /v1/models.")
    return JSONResponse(describe(card))


def describe(card: ModelCard) -> dict[str, Any]:
    """A model in OpenAI's shape; `meta` is the addition that local servers make to it."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "meta": {
            "name": card.name,
            "n_ctx": card.n_ctx,
            "n_params": card.n_params,
            "size": card.size_bytes,
            "quant": card.quant,
            "is_loaded": card.is_loaded,
            "purpose": card.purpose,
        },
    }


def describe_local(card: ModelCard) -> dict[str, Any]:
    """A model in the shape that clients of local servers look for under `models`."""
    return {
        "name": card.id,
        "model": card.id,
        "size": card.size_bytes,
        "type": "model",
        "capabilities": [CAPABILITIES[card.purpose]],
        "details": {"format": "gguf", "quantization_level": card.quant},
    }
