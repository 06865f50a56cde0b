"""Inputs to embed and pairs to rank as tokens, with the special ones that the vocabulary wants around them.

What a text says is never taken for a control token; only a file's own layout for ranking has some.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nemolocal.engine.llama.vocab import LlamaVocab

_PLACE = re.compile(r"\{(query|document)\}")


class Inputs:
    """`layout` is the file's text for ranking, with {query} and {document} in it; "" where it has none."""

    def __init__(self, library: Any, vocab: LlamaVocab, *, layout: str = "") -> None:
        self._library = library
        self._vocab = vocab
        self._layout = layout
        self._ends = self._tokenize("", adds_special=True)
        bos = int(library.llama_vocab_bos(vocab.pointer))
        n_first = int(self._ends[:1] == [bos] and (len(self._ends) > 1 or vocab.adds_bos))
        self._first, self._last = self._ends[:n_first], self._ends[n_first:]

    def of_text(self, text: str) -> list[int]:
        return self._tokenize(text, adds_special=True)

    def of_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Raises ValueError for ids outside the vocabulary."""
        n = self._vocab.n_tokens
        unknown = next((token for token in tokens if not 0 <= token < n), None)
        if unknown is not None:
            raise ValueError(f"Token {unknown} is outside the vocabulary of {n} tokens.")
        found = list(tokens)
        if self._first and found[:1] != self._first:
            found = [*self._first, *found]
        if self._last and found[-len(self._last) :] != self._last:
            found += self._last
        return found

    def of_pair(self, query: str, document: str) -> list[int]:
        """In the file's own layout, else BOS, query, EOS, SEP, document, EOS, of which those that the
        vocabulary adds (as llama.cpp's server does, tools/server/server-common.cpp)."""
        if self._layout:
            return self._in_layout({"query": query, "document": document})
        library, pointer = self._library, self._vocab.pointer
        sep = int(library.llama_vocab_sep(pointer))
        eos = int(library.llama_vocab_eos(pointer))
        begin = [int(library.llama_vocab_bos(pointer))] if self._vocab.adds_bos else []
        end = [eos if eos >= 0 else sep] if library.llama_vocab_get_add_eos(pointer) else []
        between = [sep] if library.llama_vocab_get_add_sep(pointer) else []
        return [*begin, *self._tokenize(query), *end, *between, *self._tokenize(document), *end]

    def _in_layout(self, texts: dict[str, str]) -> list[int]:
        """Cut at the control tokens and not around the texts, so that these are tokens of the whole."""
        control = self._vocab.control_texts
        pieces = (
            re.split(f"({'|'.join(map(re.escape, control))})", self._layout) if control else [self._layout]
        )
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                tokens += self._tokenize(piece, parses_control=True)
            else:
                tokens += self._tokenize(_PLACE.sub(lambda place: texts[place[1]], piece))
        return tokens

    def _tokenize(self, text: str, *, adds_special: bool = False, parses_control: bool = False) -> list[int]:
        library, raw = self._library, text.encode("utf-8", "replace")
        size = len(raw) + 8  # a token takes at least a byte, but for a prefix that some vocabularies add
        while True:
            tokens = (library.llama_token * size)()
            n = library.llama_tokenize(
                self._vocab.pointer, raw, len(raw), tokens, size, adds_special, parses_control
            )
            if n >= 0:
                return list(tokens[:n])
            size = -n
