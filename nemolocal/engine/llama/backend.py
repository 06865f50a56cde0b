"""`Backend` on llama.cpp: one model, its context, and the batches that it computes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemolocal.engine.backend import Batch, CacheFullError, Sampled, Sampler
from nemolocal.engine.llama.adapters import LoraAdapters
from nemolocal.engine.llama.arrays import BatchArrays
from nemolocal.engine.llama.library import Log, describe, load_library, load_model, open_context
from nemolocal.engine.llama.memory import LlamaMemory
from nemolocal.engine.llama.sampler import DeviceSampling, LlamaSampler, Samplers
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.engine.messages import LoadSpec, ModelInfo
from nemolocal.errors import EngineError
from nemolocal.types import SamplingParams

N_SAMPLED_IN_TURN = 3  # up to here, handing rows to other threads costs more than it saves
N_SAMPLED_AT_ONCE = 8  # rows whose candidates the device picked, for one thread: each takes microseconds
N_SAMPLING_THREADS = 16
KV_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}


class LlamaBackend:
    """One model and its context.

    Raises EngineError when the file cannot be loaded or the memory does not suffice, with llama.cpp's own
    last word on it. `on_progress` gets the loaded share of the weights, 0 to 1. llama.cpp has one log for all
    models of a process: `log` is the listener of the one that was loaded before.
    """

    def __init__(
        self, spec: LoadSpec, on_progress: Callable[[float], None], *, log: Log | None = None
    ) -> None:
        self._library = library = load_library(spec)
        self.log = log or Log(library, spec.visible_devices)
        self._number = self.log.allocated.begin()
        self._owns_log = log is None
        self._spec = spec
        self._model = load_model(library, spec, self.log, on_progress)
        self.vocab = LlamaVocab(library, self._model)
        self._device = DeviceSampling(library, spec.n_slots) if _samples_on_device(spec) else None
        self._context = self._make_context(spec)
        self.memory = LlamaMemory(
            library, self._model, self._context, n_slots=spec.n_slots, is_shared=spec.kv_layout == "shared"
        )
        self.n_ctx = self.memory.n_ctx_slot
        self.n_slots = spec.n_slots
        # Not the one asked for: llama.cpp cuts it down to the context, and aborts on a larger batch.
        self.n_batch = int(library.llama_n_batch(self._context))
        if self.memory.has_window:
            # In planning a batch of several parts llama.cpp drops what the first of them still needs.
            self.n_batch = min(self.n_batch, int(library.llama_n_ubatch(self._context)))
        self.n_outputs = spec.n_slots + spec.n_drafted
        self.is_async = spec.n_gpu_layers != 0
        self._samplers = Samplers(library, self._context, self.vocab, n_ctx=self.n_ctx)
        self._adapters = LoraAdapters(library, self._context, self._load_adapters(spec))
        self._arrays = BatchArrays(library, self.n_batch)
        self._pool = ThreadPoolExecutor(min(N_SAMPLING_THREADS, spec.n_slots, os.cpu_count() or 1))
        self._wanted: list[Wanted] = []
        self._warm_up()

    # Backend -------------------------------------------------------------------------------------

    def sampler(self, params: SamplingParams, prompt: list[int], *, n_logprobs: int | None) -> Sampler:
        return self._samplers.make(params, prompt, n_logprobs)

    def launch(self, batch: Batch) -> None:
        self._adapters.use(batch.adapters)
        if self._device:
            sampled = [(row.slot, row.sampler) for row in batch.rows if isinstance(row.sampler, LlamaSampler)]
            # Off comes last: to be switched on may take other slots along.
            for slot, sampler in sorted(sampled, key=lambda each: each[1].needs_all):
                self._device.switch(self._context, slot, is_on=not sampler.needs_all)
        self._wanted = self._write(batch)
        result = self._library.llama_decode(self._context, self._arrays.batch)
        self.memory.settle()
        if result == 1:
            raise CacheFullError
        if result != 0:
            raise EngineError(
                f"The model could not compute a batch (llama_decode: {result}). {self.log.last}"
            )

    def collect(self) -> list[Sampled]:
        self._library.llama_synchronize(self._context)
        wanted = self._wanted
        n_costly = sum(sampler.needs_all or not self._device for sampler, _, _ in wanted)
        n_at_once = 1 if n_costly > N_SAMPLED_IN_TURN else N_SAMPLED_AT_ONCE
        if len(wanted) <= max(N_SAMPLED_IN_TURN, n_at_once):
            return self._sample(wanted)
        # Reading one row settles the order of all, so that the threads below only read.
        first = self._sample(wanted[:1])
        parts = [wanted[at : at + n_at_once] for at in range(1, len(wanted), n_at_once)]
        return [*first, *itertools.chain.from_iterable(self._pool.map(self._sample, parts))]

    def close(self) -> None:
        self._pool.shutdown()
        self._samplers.close()
        self._library.llama_free(self._context)
        if self._device:
            self._device.close()
        self._library.llama_model_free(self._model)
        if self._owns_log:
            self.log.close()

    # What the parent is told ---------------------------------------------------------------------

    def info(self) -> ModelInfo:
        held = self.log.allocated.held(self._number)
        return describe(self._library, self._model, self.vocab, n_ctx=self.n_ctx, held=held)

    # Inside --------------------------------------------------------------------------------------

    def _write(self, batch: Batch) -> list[Wanted]:
        """Hand the rows over; what is to be sampled from them."""
        wanted, counts, end = [], [], 0
        for row in batch.rows:
            end += len(row.tokens)
            n = 0
            if isinstance(row.sampler, LlamaSampler):
                n = 1 + row.n_drafted
                guessed = row.tokens[-row.n_drafted :] if row.n_drafted else []
                wanted.append((row.sampler, range(end - n, end), guessed))
            counts.append(n)
        self._arrays.write(batch.rows, counts)
        return wanted

    def _sample(self, wanted: list[Wanted]) -> list[Sampled]:
        return [self._samplers.sample(*each) for each in wanted]

    def _load_adapters(self, spec: LoadSpec) -> list[Any]:
        pointers = []
        for path, _ in spec.adapters:
            pointer = self._library.llama_adapter_lora_init(self._model, os.fsencode(path))
            if not pointer:
                raise self.log.failure(
                    f"The LoRA adapter {path} could not be loaded: {self.log.last}",
                    hint="It must be a GGUF adapter made for this model.",
                )
            pointers.append(pointer)
        return pointers

    def _make_context(self, spec: LoadSpec) -> Any:
        library = self._library
        params = library.llama_context_default_params()
        is_shared = spec.kv_layout == "shared"
        params.n_ctx = spec.n_ctx if is_shared else spec.n_ctx * spec.n_slots
        params.n_batch = max(spec.n_batch, spec.n_ubatch)
        params.n_ubatch = spec.n_ubatch
        params.n_seq_max = spec.n_slots
        # The default reserves a row of logits for every prompt token: 256 MiB for a 128k vocabulary.
        params.n_outputs_max = spec.n_slots + spec.n_drafted
        params.n_outputs_max_per_seq = 1 + spec.n_drafted
        params.n_threads = params.n_threads_batch = spec.n_threads
        params.kv_unified = is_shared
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = KV_TYPES[spec.kv_type]
        if self._device:
            params.samplers, params.n_samplers = self._device.configs, len(self._device.configs)
        return open_context(library, self._model, params, n_ctx=spec.n_ctx, log=self.log)

    def _warm_up(self) -> None:
        """Touch all weights once, so that the first request does not pay for it."""
        library = self._library
        tokens = (library.llama_token * 1)(self.vocab.first_token)
        library.llama_set_warmup(self._context, True)
        library.llama_decode(self._context, library.llama_batch_get_one(tokens, 1))
        library.llama_synchronize(self._context)
        library.llama_set_warmup(self._context, False)
        if self._spec.n_gpu_layers > library.llama_model_n_layer(self._model) and not self._spec.host_experts:
            self._read_the_longest_part()
        self.memory.clear()
        _ = self.vocab.ends  # found by going through the whole vocabulary

    def _read_the_longest_part(self) -> None:
        """On GPUs as many tokens as are ever computed at once, which takes a moment: what CUDA needs beside
        llama.cpp's own buffers is then taken, so that it can be measured, and a lack of it shows now."""
        library = self._library
        n = min(int(library.llama_n_ubatch(self._context)), self.n_batch, self.n_ctx)
        tokens = (library.llama_token * n)(*[self.vocab.first_token] * n)
        self.memory.clear()
        library.llama_decode(self._context, library.llama_batch_get_one(tokens, n))
        library.llama_synchronize(self._context)


Wanted = tuple[LlamaSampler, range, list[int]]
"""A row that is sampled: with what, from which outputs of the batch, and the guesses among its tokens."""


def _samples_on_device(spec: LoadSpec) -> bool:
    """Whether the output layer is where picking candidates is cheap; a tensor split cannot do it."""
    if spec.sampling != "auto":
        return spec.sampling == "device"
    return spec.n_gpu_layers != 0 and spec.split_mode != "tensor"
