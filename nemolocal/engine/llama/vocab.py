"""`Vocab` on llama.cpp: text to tokens and tokens to bytes."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from nemolocal.types import Prompt, Segment


class LlamaVocab:
    """The vocabulary of one loaded model. Reads only, so any thread may use it."""

    def __init__(self, library: Any, model: Any) -> None:
        self._library = library
        self.pointer = library.llama_model_get_vocab(model)
        self.n_tokens = int(library.llama_vocab_n_tokens(self.pointer))
        self.adds_bos = bool(library.llama_vocab_get_add_bos(self.pointer))
        self._bos = int(library.llama_vocab_bos(self.pointer))
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = []
        for part in prompt:
            if isinstance(part, Segment):
                tokens += self._tokenize(part.text.encode("utf-8", "replace"), part.is_control)
            elif 0 <= part < self.n_tokens:
                tokens.append(part)
            else:
                raise ValueError(f"Token {part} is outside the vocabulary of {self.n_tokens} tokens.")
        if self.adds_bos and tokens[:1] != [self._bos] and not (prompt and isinstance(prompt[0], int)):
            tokens.insert(0, self._bos)
        return tokens

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self._piece(token, special=False)
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def is_control(self, token: int) -> bool:
        return token in self._control

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        is_end = self._library.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_tokens) if is_end(self.pointer, token))

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """What the control tokens look like in a prompt, longest first."""
        texts = {self._piece(token, special=True).decode("utf-8", "replace") for token in self._control}
        return tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))

    @property
    def first_token(self) -> int:
        """Some token that every model can read."""
        return max(self._bos, 0)

    @property
    def bos(self) -> str:
        return self.text(self._bos)

    @property
    def eos(self) -> str:
        return self.text(self._library.llama_vocab_eos(self.pointer))

    def text(self, token: int) -> str:
        """How a token is written in a prompt, "" for one that is not there (-1)."""
        return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @cached_property
    def _control(self) -> frozenset[int]:
        is_control = self._library.llama_vocab_is_control
        return frozenset(token for token in range(self.n_tokens) if is_control(self.pointer, token))

    def _tokenize(self, text: bytes, parses_control: bool) -> list[int]:
        library = self._library
        size = len(text) + 8  # a token takes at least a byte, but for a prefix that some vocabularies add
        tokens = (library.llama_token * size)()
        n = library.llama_tokenize(self.pointer, text, len(text), tokens, size, False, parses_control)
        if n < 0:
            tokens = (library.llama_token * -n)()
            n = library.llama_tokenize(self.pointer, text, len(text), tokens, -n, False, parses_control)
        return list(tokens[:n])

    def _piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._library.llama_token_to_piece(self.pointer, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n
