"""From the bytes of a request to a checked value: size, encoding, JSON, then the schema.

Each fault is an InvalidRequestError (or a refusal with its own status) that names the field by its path,
like `messages[0].content`, and never repeats what was sent.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.requests import Request

from nemolocal.api.errors import RefusedError
from nemolocal.errors import InvalidRequestError

MAX_BODY_BYTES = 64 << 20  # documents come in it, in base64


class Schema(pydantic.BaseModel):
    """A wire shape: no number is read out of a string, nothing is infinite, unknown fields are ignored."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


Body = TypeVar("Body", bound=pydantic.BaseModel)


async def read(request: Request, schema: type[Body]) -> Body:
    """The request's JSON body as a `schema`."""
    return check(schema, parse(await read_bytes(request)))


async def read_bytes(request: Request) -> bytes:
    """The raw body. Refuses compressed and oversized ones; a declared length is believed before reading."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusedError(
            "Compressed request bodies are not read.",
            status=415,
            code="unsupported_encoding",
            hint="Send it without Content-Encoding.",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def parse(raw: bytes) -> Any:
    """JSON as the standard has it: UTF-8, no NaN or Infinity, no lone surrogates, at most 200 levels deep."""
    try:
        return pydantic_core.from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None


def check(schema: type[Body], data: Any) -> Body:
    """`data` as a `schema`; the first fault is raised."""
    if not isinstance(data, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    try:
        return schema.model_validate(data)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = path_of(first["loc"])
        raise InvalidRequestError(f"{param}: {_sentence(first['msg'])}", param=param) from None


def path_of(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _sentence(text: str) -> str:
    text = text.replace("Input should be", "must be").replace("Field required", "is required")
    return text if text.endswith(".") else text + "."


def _too_large() -> RefusedError:
    return RefusedError(
        f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.",
        status=413,
        code="request_too_large",
        hint="Send less at once.",
    )
