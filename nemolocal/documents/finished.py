"""Parts of summaries that are done, kept in the database, so that a run that was broken off goes on where it
was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from nemolocal import database
from nemolocal.config import Config
from nemolocal.generation import GenerationParams
from nemolocal.types import Message, Usage


class Finished:
    """What was written for which prompt. Everything here blocks."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def get(self, key: str) -> tuple[str, Usage] | None:
        with database.reading(self._config) as connection:
            found = connection.execute(
                "SELECT text, prompt_tokens, completion_tokens FROM summary_parts WHERE key = ?", (key,)
            ).fetchone()
        return (found[0], Usage(found[1], found[2])) if found else None

    def put(self, key: str, sha256: str, text: str, usage: Usage) -> None:
        """Keep a part of the summary of the document with this hash."""
        values = (key, sha256, text, usage.prompt_tokens, usage.completion_tokens, time.time())
        with database.session(self._config) as connection:
            connection.execute("INSERT OR REPLACE INTO summary_parts VALUES (?, ?, ?, ?, ?, ?)", values)


def key_of(model_id: str, messages: Sequence[Message], params: GenerationParams) -> str:
    """The same only for the same model, prompt and parameters."""
    told = [model_id, [[m.role, m.content] for m in messages], asdict(params)]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
