"""Samplers on llama.cpp: the chain of each request, and the device's part of the work.

There are two ways to the next token. The device picks the likeliest N_CANDIDATES of each row and hands those
over, or it hands over all logits; either way the request's own chain chooses on the CPU. The first way copies
and sorts a hundredth of the second's; the second is for requests that need every logit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemolocal.engine import sampling
from nemolocal.engine.backend import Sampled
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.errors import InvalidRequestError
from nemolocal.types import Candidate, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    import numpy as np

N_DRY_KEPT = 4  # preparing DRY's breakers goes through the whole vocabulary


class LlamaSampler:
    """The chain of one request."""

    def __init__(self, library: Any, pointer: Any, tables: list[Any], *, needs_all: bool) -> None:
        self._library = library
        self.pointer = pointer
        self._tables = tables  # C reads these arrays as long as the chain lives
        self.needs_all = needs_all
        self.n_logprobs: int | None = None

    def close(self) -> None:
        if self.pointer:
            self._library.llama_sampler_free(self.pointer)
            self.pointer = None


class Samplers:
    """Makes chains, and samples with them."""

    def __init__(self, library: Any, context: Any, vocab: LlamaVocab, *, n_ctx: int) -> None:
        self._library = library
        self._context = context
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._dry: dict[sampling.Step, Any] = {}

    def make(self, params: SamplingParams, prompt: Sequence[int], n_logprobs: int | None) -> LlamaSampler:
        """Raises InvalidRequestError for a bias on a token that is not in the vocabulary."""
        library = self._library
        tables: list[Any] = []
        ends = tuple(self._vocab.ends)
        self._check(params)
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for step in sampling.chain(params, prompt, n_ctx=self._n_ctx, ends=ends):
            pointer = self._make_step(step, tables)
            for token in step.history:
                library.llama_sampler_accept(pointer, token)
            library.llama_sampler_chain_add(chain, pointer)
        needs_all = sampling.needs_all_logits(params, n_ends=len(ends), n_logprobs=n_logprobs)
        sampler = LlamaSampler(library, chain, tables, needs_all=needs_all)
        sampler.n_logprobs = n_logprobs
        return sampler

    def sample(self, sampler: LlamaSampler, outputs: Sequence[int], drafted: Sequence[int]) -> Sampled:
        """One token after another from the batch's `outputs`, for as long as each is the drafted one."""
        sampled = Sampled([])
        for index, output in enumerate(outputs):
            token = int(self._library.llama_sampler_sample(sampler.pointer, self._context, output))
            sampled.tokens.append(token)
            if sampler.n_logprobs is not None:
                sampled.logprobs.append(self._logprobs(output, token, sampler.n_logprobs))
            if index == len(drafted) or token != drafted[index]:
                break
        return sampled

    def close(self) -> None:
        for pointer in self._dry.values():
            self._library.llama_sampler_free(pointer)
        self._dry.clear()

    def _check(self, params: SamplingParams) -> None:
        unknown = [token for token, _ in params.logit_bias if token >= self._vocab.n_tokens]
        if unknown:
            raise InvalidRequestError(
                f"logit_bias: token {unknown[0]} is outside the vocabulary of {self._vocab.n_tokens} tokens.",
                param="logit_bias",
            )

    def _make_step(self, step: sampling.Step, tables: list[Any]) -> Any:
        library, n_tokens = self._library, self._vocab.n_tokens
        if step.name == "dry":
            return self._make_dry(step)
        arguments: tuple[Any, ...] = step.arguments
        if step.name == "logit_bias":
            table = (library.llama_logit_bias * len(step.bias))(*step.bias)
            tables.append(table)
            arguments = (n_tokens, len(step.bias), table)
        elif step.name == "penalties":
            arguments = (n_tokens, *arguments)
        return getattr(library, f"llama_sampler_init_{step.name}")(*arguments)

    def _make_dry(self, step: sampling.Step) -> Any:
        """A copy of a sampler that was prepared for the same breakers before."""
        key = sampling.Step("dry", step.arguments, breakers=step.breakers)
        if key not in self._dry:
            while len(self._dry) >= N_DRY_KEPT:
                self._library.llama_sampler_free(self._dry.pop(next(iter(self._dry))))
            words = [breaker.encode() for breaker in step.breakers]
            breakers = (ctypes.c_char_p * len(words))(*words)
            self._dry[key] = self._library.llama_sampler_init_dry(
                self._vocab.pointer, *step.arguments, breakers, len(words)
            )
        return self._library.llama_sampler_clone(self._dry[key])

    def _logprobs(self, output: int, token: int, n_top: int) -> TokenLogprob:
        """The model's own probabilities at an output, before any step of the chain."""
        import numpy as np  # after llama.cpp: libraries that come with numpy, loaded first, can crash it

        pointer = self._library.llama_get_logits_ith(self._context, output)
        logits = np.ctypeslib.as_array(pointer, (self._vocab.n_tokens,)).astype(np.float64)
        logits -= logits.max()
        logits -= np.log(np.exp(logits).sum())
        n_top = min(n_top, len(logits))
        likeliest = np.argpartition(-logits, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
        best_first = sorted((int(i) for i in likeliest), key=lambda i: -logits[i])
        return TokenLogprob(
            self._candidate(token, logits), tuple(self._candidate(i, logits) for i in best_first)
        )

    def _candidate(self, token: int, logprobs: np.ndarray[Any, Any]) -> Candidate:
        return Candidate(token, self._vocab.piece(token), float(logprobs[token]))


class DeviceSampling:
    """Which slots have the device pick their candidates.

    A change makes llama.cpp plan its buffers anew, some ten milliseconds, so a slot stays as it was used.
    Each slot that has it costs every step a little, so only those that were ever used have it, in powers of
    two lest each new one be a change.
    """

    def __init__(self, library: Any, n_slots: int) -> None:
        self._library = library
        self._n_slots = n_slots
        self._chains = {0: self._chain()}
        self._retired: list[Any] = []
        self._n_used = 1
        self.configs = (library.llama_sampler_seq_config * 1)(
            library.llama_sampler_seq_config(0, ctypes.cast(self._chains[0], ctypes.c_void_p))
        )

    def switch(self, context: Any, slot: int, *, is_on: bool) -> None:
        if not is_on:
            if slot in self._chains:
                self._library.llama_set_sampler(context, slot, None)
                self._retired.append(self._chains.pop(slot))  # the last graph may still know it
            return
        if slot >= self._n_used:
            new = range(self._n_used, min(1 << slot.bit_length(), self._n_slots))
            self._n_used = new.stop
        else:
            new = range(slot, slot + 1)
        for each in new:
            if each not in self._chains:
                # A new one each time: a chain that was attached before cannot be attached again.
                self._chains[each] = self._chain()
                self._library.llama_set_sampler(context, each, self._chains[each])

    def close(self) -> None:
        """After the context is gone, which uses the chains."""
        for chain in (*self._chains.values(), *self._retired):
            self._library.llama_sampler_free(chain)
        self._chains.clear()
        self._retired.clear()

    def _chain(self) -> Any:
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        # Twice, though the second pick changes nothing. The first pick's tokens are read again in the same
        # graph, so llama.cpp may give up their buffer; it keeps what takes part in a step's output, but plans
        # buffers once for many steps, and for a slot that was idle in the planned one the next slot's tokens
        # then come to lie over its own. What the second pick gives is read by nothing, so it stays.
        for _ in range(2):
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_top_k(sampling.N_CANDIDATES))
        return chain
