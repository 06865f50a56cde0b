"""Prompts and inputs as OpenAI's requests hold them: a text, a list of texts, a list of token ids, or a list
of those."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError


def as_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """Any of the forms as a list of prompts; for a pydantic field. Texts may be empty, lists may not."""
    is_one = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)
    )
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not prompts:
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of either, and not empty")
    if len({type(prompt) for prompt in prompts}) != 1:
        raise PydanticCustomError("prompt", "must not mix texts and token ids")
    return [_as_prompt(prompt) for prompt in prompts]


def _as_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "must be a text or a list of token ids that is not empty")
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise PydanticCustomError("prompt", "its token ids must be whole numbers from 0")
    return tuple(value)
