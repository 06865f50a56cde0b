"""A second reading of everything that the engine says.

`Tap` stands between the scheduler and the real backend and writes down what came out for each request.
`Referee` reads the same tokens in one go in a fresh context of llama.cpp's own, knowing nothing of slots,
caches or checkpoints. A wrong position, state or cell anywhere in between makes the two part.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as library
import numpy as np

from nemolocal.engine.backend import Adapters, Batch, Row, Sampled, Sampler
from nemolocal.engine.batching import Budget
from nemolocal.engine.cache import WarmState
from nemolocal.engine.llama.backend import KV_TYPES, LlamaBackend
from nemolocal.engine.llama.memory import LlamaMemory
from nemolocal.engine.messages import Chunk, Failed
from nemolocal.engine.scheduler import Ended, Scheduler, StepEvent
from nemolocal.engine.speculation import NgramDrafter
from nemolocal.types import GenerationParams, SamplingParams, TokenLogprob, Usage

N_CTX = 512
LEAST_NOISE = 0.0025  # of log probability
N_TOP = 16  # log probabilities that are compared for each token, beside the chosen one's

Shift = tuple[int, int, int]
"""How many tokens had been said when the context was shifted, where, and how many went."""


@dataclass
class Record:
    """What the backend was asked for one request, and everything that it said."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)
    adapters: Adapters = ()


class Referee:
    """One plain context with one sequence, emptied before every reading.

    With `has_ties` a rounding may decide between two experts or two steps of a quantized cache, and a token
    now and then comes out otherwise.
    """

    def __init__(
        self, path: Path, *, kv_type: str = "f16", has_ties: bool = False, adapters: Sequence[Path] = ()
    ) -> None:
        self._has_ties = has_ties
        library.llama_backend_init()
        params = library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        self._lora = [library.llama_adapter_lora_init(self._model, str(a).encode()) for a in adapters]
        context = library.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = N_CTX
        context.n_outputs_max = context.n_outputs_max_per_seq = N_CTX
        context.n_threads = context.n_threads_batch = 1
        context.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context.type_k = context.type_v = KV_TYPES[kv_type]
        self._context = library.llama_init_from_model(self._model, context)
        assert self._context
        self._memory = library.llama_get_memory(self._context)
        self._n_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self.noise = self._measure_noise()

    def close(self) -> None:
        library.llama_free(self._context)
        library.llama_model_free(self._model)

    def logprobs(self, record: Record) -> np.ndarray:
        """The log probabilities of all tokens wherever one was said: (said tokens, vocabulary)."""
        library.llama_memory_clear(self._memory, True)
        self._use(record.adapters)
        text = [*record.prompt, *record.tokens]
        at, position, parts = 0, 0, []
        for n_said, start, n in [*record.shifts, (len(record.tokens), 0, 0)]:
            end = (
                len(record.prompt) + n_said - 1
            )  # the last token is not read before what follows it is asked
            parts.append(self._read(text[at:end], position))
            position += end - at
            at = end
            if n:
                library.llama_memory_seq_rm(self._memory, 0, start, start + n)
                library.llama_memory_seq_add(self._memory, 0, start + n, -1, -n)
                position -= n
        return np.concatenate(parts)[len(record.prompt) - 1 :]

    def agrees(self, parted: np.ndarray) -> bool:
        """Whether two readings that are so far apart at each token are the same but for rounding."""
        if not len(parted):
            return True
        n_beyond = int((parted > 8.0 * self.noise).sum())
        if self._has_ties:
            return bool(np.median(parted) <= 3.0 * self.noise) and n_beyond <= 1 + len(parted) // 10
        return bool(parted.mean() <= 3.0 * self.noise) and n_beyond == 0

    def _measure_noise(self) -> float:
        """How far apart two right readings of the same text are at nearly all tokens: one in one go, and one
        in pieces, as an answer is written."""
        rng = random.Random(0)
        text = [rng.randrange(3, self._n_vocab) for _ in range(300)]
        whole = self._read(text, 0)
        library.llama_memory_clear(self._memory, True)
        pieces = [text[:70], text[70:200], *([token] for token in text[200:])]
        starts = itertools.accumulate(map(len, pieces), initial=0)
        again = [self._read(piece, start) for piece, start in zip(pieces, starts, strict=False)]
        parted = np.abs(whole - np.concatenate(again))[200:]
        likely = np.argsort(-whole[200:], axis=1)[:, :N_TOP]
        by_token = np.take_along_axis(parted, likely, axis=1).max(axis=1)
        return max(float(np.quantile(by_token, 0.95)), LEAST_NOISE)

    def _read(self, tokens: Sequence[int], position: int) -> np.ndarray:
        n = len(tokens)
        if n == 0:  # nothing was said after the last shift
            return np.zeros((0, self._n_vocab))
        batch = library.llama_batch_init(n, 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        batch.n_tokens = n
        result = library.llama_decode(self._context, batch)
        library.llama_batch_free(batch)
        assert result == 0, result
        pointer = library.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, (n, self._n_vocab)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def _use(self, scales: Adapters) -> None:
        n = len(scales)
        pointers = (ctypes.c_void_p * n)(*(ctypes.cast(a, ctypes.c_void_p).value for a in self._lora))
        array = ctypes.cast(pointers, ctypes.POINTER(library.llama_adapter_lora_p_ctypes))
        result = library.llama_set_adapters_lora(self._context, array, n, (ctypes.c_float * n)(*scales))
        assert result == 0


class TapMemory:
    """Passes everything on, and says when a context was shifted."""

    def __init__(self, memory: LlamaMemory, note: Callable[[int, int, int], None]) -> None:
        self._memory = memory
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def shift(self, slot: int, start: int, n: int) -> None:
        self._note(slot, start, n)
        self._memory.shift(slot, start, n)


class Tap:
    """A `Backend` that passes everything on and keeps a record of each request."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self.n_ctx, self.n_slots, self.n_batch = backend.n_ctx, backend.n_slots, backend.n_batch
        self.n_outputs, self.is_async = backend.n_outputs, backend.is_async
        self.vocab = backend.vocab
        self.memory = TapMemory(backend.memory, self._note_shift)
        self.records: list[Record] = []
        self.batches: list[list[Row]] = []
        self._by_sampler: dict[Sampler, Record] = {}
        self._by_slot: dict[int, Record] = {}

    def sampler(self, params: SamplingParams, prompt: list[int], *, n_logprobs: int | None) -> Sampler:
        sampler = self._backend.sampler(params, prompt, n_logprobs=n_logprobs)
        self.records.append(Record(list(prompt)))
        self._by_sampler[sampler] = self.records[-1]
        return sampler

    def launch(self, batch: Batch) -> None:
        self._backend.launch(batch)
        self.batches.append(list(batch.rows))

    def collect(self) -> list[Sampled]:
        everything = self._backend.collect()
        rows = [row for row in self.batches[-1] if row.sampler]
        for row, sampled in zip(rows, everything, strict=True):
            assert row.sampler
            record = self._by_slot[row.slot] = self._by_sampler[row.sampler]
            record.tokens += sampled.tokens
            record.logprobs += sampled.logprobs
        return everything

    def close(self) -> None:
        """Nothing: the backend serves more than one tap."""

    def _note_shift(self, slot: int, start: int, n: int) -> None:
        record = self._by_slot[slot]
        record.shifts.append((len(record.tokens), start, n))


class Stage:
    """A scheduler over an emptied backend, and requests whose every token is compared in the end."""

    def __init__(
        self, backend: LlamaBackend, referee: Referee, *, n_prefill: int = 64, speculates: bool = False
    ) -> None:
        backend.memory.clear()
        self.tap = Tap(backend)
        self.scheduler = Scheduler(
            self.tap, drafter=NgramDrafter() if speculates else None, state_bytes=64 << 20
        )
        self.events: list[StepEvent] = []
        self.admitted: list[int] = []
        self._referee = referee
        self.budget = Budget(n_prefill, n_prefill)

    def ask(
        self,
        prompt: list[int],
        n_new: int = 8,
        *,
        is_greedy: bool = False,
        favoured: Sequence[int] = (),
        warm: WarmState | None = None,
        adapters: Adapters = (),
        has_logprobs: bool = True,
        **more: Any,
    ) -> int:
        """Queue a request; its id. It writes `n_new` tokens in any case, only `favoured` ones if given."""
        id = len(self.tap.records)
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=id,
            ignore_eos=True,
            logit_bias=tuple((token, 90.0) for token in favoured),
        )
        params = GenerationParams(
            sampling=sampling,
            max_tokens=n_new,
            reuse_cache=True,
            speculate=True,
            n_logprobs=N_TOP if has_logprobs else None,
            **more,
        )
        self.scheduler.add(id, prompt, params, adapters=adapters, warm=warm)
        self.tap.records[id].adapters = adapters
        return id

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.events += self.scheduler.step(self.budget)
            self.admitted += self.scheduler.admitted

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(5_000):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def run_until_said(self, id: int, n: int = 1) -> None:
        """Step until a request has said `n` tokens."""
        while len(self.tap.records[id].tokens) < n:
            self.step()

    def text(self, id: int) -> list[int]:
        """Prompt and answer."""
        record = self.tap.records[id]
        return [*record.prompt, *record.tokens]

    def usage(self, id: int) -> Usage:
        [end] = [event for event in self.events if isinstance(event, Ended) and event.id == id]
        return end.usage

    def parted(self, id: int) -> np.ndarray:
        """How far apart the engine and the referee are at each token of an answer, in log probability."""
        record = self.tap.records[id]
        if not record.tokens:
            return np.zeros(0)
        right = self._referee.logprobs(record)
        if not record.logprobs:  # a greedy answer: how much likelier another token would have been
            right[:, list(self.tap.vocab.ends)] = -np.inf
            return right.max(axis=1) - right[range(len(right)), record.tokens]
        said = [[logprob.chosen, *logprob.top] for logprob in record.logprobs]
        assert [each[0].token for each in said] == record.tokens
        return np.array(
            [
                max(abs(candidate.logprob - row[candidate.token]) for candidate in each)
                for each, row in zip(said, right, strict=True)
            ]
        )

    def check(self) -> None:
        """What was said so far is what a fresh context says to the same text, and nothing failed."""
        assert not [event for event in self.events if isinstance(event, Failed)]
        for id, record in enumerate(self.tap.records):
            parted = self.parted(id)
            assert self._referee.agrees(parted), f"request {id} of {len(record.prompt)} tokens: {parted}"

    def check_text(self, id: int) -> None:
        """What was sent is what was said."""
        sent = "".join(event.text for event in self.events if isinstance(event, Chunk) and event.id == id)
        said = b"".join(map(self.tap.vocab.piece, self.tap.records[id].tokens))
        assert sent == said.decode("utf-8", "replace")
