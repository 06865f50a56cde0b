"""Probabilities of tokens in the two shapes that OpenAI has for them: chat's, and the older one of raw
completions. Both hold natural logarithms of the model's own probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from nemolocal.types import Candidate, TokenLogprob

IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI writes this


def chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of chat. `bytes` are the token's own; `token` is what can be read of them."""
    return {
        "content": [
            _described(token.chosen) | {"top_logprobs": [_described(other) for other in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


class Legacy:
    """`choices[].logprobs` of raw completions, piece by piece: `text_offset` counts the characters of the
    answer before each token, so it goes on from one piece of a stream to the next."""

    def __init__(self) -> None:
        self._n_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens. `top_logprobs` holds the chosen token too, also where it is not among the top."""
        offsets = []
        for token in tokens:
            offsets.append(self._n_chars)
            self._n_chars += len(self._decoder.decode(token.chosen.piece))
        return {
            "tokens": [_name(token.chosen) for token in tokens],
            "token_logprobs": [_finite(token.chosen.logprob) for token in tokens],
            "top_logprobs": [
                {_name(each): _finite(each.logprob) for each in (token.chosen, *token.top)}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _described(candidate: Candidate) -> dict[str, Any]:
    return {
        "token": candidate.piece.decode("utf-8", "replace"),
        "logprob": _finite(candidate.logprob),
        "bytes": list(candidate.piece),
    }


def _name(candidate: Candidate) -> str:
    """The token as text. Parts of characters are spelled out, as OpenAI does, since this shape has no bytes
    and uses the names as keys."""
    try:
        return candidate.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.piece)


def _finite(logprob: float) -> float:
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE
