"""`Backend` on llama.cpp's low-level API: the only module that imports llama_cpp.

Knows contexts, batches and samplers; knows nothing of requests, text or stop strings.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemolocal.engine import sampling
from nemolocal.engine.backend import Batch, CacheFullError, Sampler
from nemolocal.engine.messages import LoadSpec, ModelInfo
from nemolocal.errors import EngineError, InvalidRequestError
from nemolocal.types import Prompt, SamplingParams, Segment

N_SAMPLED_IN_TURN = 3  # up to here, handing rows to other threads costs more than it saves
N_SAMPLING_THREADS = 16
BUFFER_LINE = re.compile(r"(\S+)\s+(model|KV|RS|output|compute)\s+buffer size\s+=\s+([\d.]+) MiB")


class LlamaSampler:
    """A chain of llama.cpp's samplers."""

    def __init__(self, library: Any, pointer: Any, tables: list[Any]) -> None:
        self._library = library
        self.pointer = pointer
        self._tables = tables  # C reads these arrays as long as the chain lives

    def close(self) -> None:
        if self.pointer:
            self._library.llama_sampler_free(self.pointer)
            self.pointer = None


class LlamaBackend:
    """One model and its context.

    Raises EngineError when the file cannot be loaded or the memory does not suffice, with llama.cpp's own
    last word on it. `on_progress` gets the loaded share of the weights, 0 to 1.
    """

    def __init__(self, spec: LoadSpec, on_progress: Callable[[float], None]) -> None:
        _choose_devices(spec)
        import llama_cpp  # after the devices are chosen: CUDA reads the environment once

        self._library = library = llama_cpp.llama_cpp
        self._log = _Log(library)
        library.llama_backend_init()
        if spec.n_gpu_layers != 0 and not library.llama_supports_gpu_offload():
            raise EngineError(
                "The plan uses GPUs, but the installed llama-cpp-python was built without CUDA.",
                hint="Run installer/run.py again to install the CUDA build, or plan with --gpu-layers 0.",
            )
        self._model = self._load_model(spec, on_progress)
        self._vocab = library.llama_model_get_vocab(self._model)
        self._context = self._make_context(spec)
        self._memory = library.llama_get_memory(self._context)
        self.n_ctx = int(library.llama_n_ctx(self._context))
        self.n_slots = spec.n_slots
        # Not the one asked for: llama.cpp cuts it down to the context, and aborts on a larger batch.
        self.n_batch = int(library.llama_n_batch(self._context))
        self.can_rollback = not (
            library.llama_model_is_recurrent(self._model)
            or library.llama_model_is_hybrid(self._model)
            or library.llama_model_n_swa(self._model) > 0
        )
        self._n_vocab = int(library.llama_vocab_n_tokens(self._vocab))
        self._pieces: dict[int, bytes] = {}
        self._rows = _BatchArrays(library, self.n_batch)
        self._pool = ThreadPoolExecutor(min(N_SAMPLING_THREADS, spec.n_slots, os.cpu_count() or 1))
        self._warm_up()

    # Backend -------------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = []
        for part in prompt:
            if isinstance(part, Segment):
                tokens += self._tokenize(part.text.encode("utf-8", "replace"), part.is_control)
            elif 0 <= part < self._n_vocab:
                tokens.append(part)
            else:
                raise ValueError(f"Token {part} is outside the vocabulary of {self._n_vocab} tokens.")
        bos = self._library.llama_vocab_bos(self._vocab)
        adds_bos = self._library.llama_vocab_get_add_bos(self._vocab)
        if adds_bos and tokens[:1] != [bos] and not (prompt and isinstance(prompt[0], int)):
            tokens.insert(0, bos)
        return tokens

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self._piece(token, special=False)
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        return bool(self._library.llama_vocab_is_eog(self._vocab, token))

    def sampler(self, params: SamplingParams, prompt: list[int]) -> Sampler:
        library, tables = self._library, []
        unknown = [token for token, _ in params.logit_bias if token >= self._n_vocab]
        if unknown:
            raise InvalidRequestError(
                f"logit_bias: token {unknown[0]} is outside the vocabulary of {self._n_vocab} tokens.",
                param="logit_bias",
            )
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for step in sampling.chain(params):
            arguments: tuple[Any, ...] = step.arguments
            if step.name == "logit_bias":
                table = (library.llama_logit_bias * len(step.bias))(*step.bias)
                tables.append(table)
                arguments = (self._n_vocab, len(step.bias), table)
            elif step.name == "penalties":
                arguments = (self._n_vocab, *arguments)
            library.llama_sampler_chain_add(
                chain, getattr(library, f"llama_sampler_init_{step.name}")(*arguments)
            )
        for token in sampling.penalised_history(params, prompt):
            library.llama_sampler_accept(chain, token)
        return LlamaSampler(library, chain, tables)

    def decode(self, batch: Batch) -> list[int]:
        wanted = self._rows.fill(batch)
        result = self._library.llama_decode(self._context, self._rows.batch)
        if result == 1:
            raise CacheFullError
        if result != 0:
            raise EngineError(
                f"The model could not compute a batch (llama_decode: {result}). {self._log.last}"
            )
        if not wanted:
            return []
        self._library.llama_synchronize(self._context)
        if len(wanted) <= N_SAMPLED_IN_TURN:
            return [self._sample(row) for row in wanted]
        # Reading one row settles the order of all, so that the threads below only read.
        self._library.llama_get_logits_ith(self._context, wanted[0][0])
        return list(self._pool.map(self._sample, wanted))

    def remove(self, slot: int, start: int) -> bool:
        return bool(self._library.llama_memory_seq_rm(self._memory, slot, start, -1))

    def copy(self, source: int, target: int, end: int) -> None:
        self._library.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def close(self) -> None:
        self._pool.shutdown()
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)
        self._log.close()

    # What the parent is told ---------------------------------------------------------------------

    def info(self) -> ModelInfo:
        library, vocab = self._library, self._vocab
        tokens = range(self._n_vocab)
        control = {self._piece(t, special=True) for t in tokens if library.llama_vocab_is_control(vocab, t)}
        texts = [text.decode("utf-8", "replace") for text in control if text]
        return ModelInfo(
            name=self._metadata("general.name"),
            architecture=self._metadata("general.architecture"),
            n_ctx=self.n_ctx,
            n_ctx_train=int(library.llama_model_n_ctx_train(self._model)),
            n_params=int(library.llama_model_n_params(self._model)),
            size_bytes=int(library.llama_model_size(self._model)),
            n_vocab=self._n_vocab,
            bos=self._text(library.llama_vocab_bos(vocab)),
            eos=self._text(library.llama_vocab_eos(vocab)),
            adds_bos=bool(library.llama_vocab_get_add_bos(vocab)),
            control_tokens=tuple(sorted(texts, key=lambda text: (-len(text), text))),
            chat_template=(library.llama_model_chat_template(self._model, None) or b"").decode(
                "utf-8", "replace"
            ),
            library=f"llama.cpp {library.llama_version().decode()}",
            system_info=library.llama_print_system_info().decode(),
            buffers=tuple(self._log.buffers),
        )

    # Inside --------------------------------------------------------------------------------------

    def _load_model(self, spec: LoadSpec, on_progress: Callable[[float], None]) -> Any:
        library = self._library
        params = library.llama_model_default_params()
        params.n_gpu_layers = spec.n_gpu_layers
        params.split_mode = {"none": 0, "layer": 1, "tensor": 3}[spec.split_mode]
        if spec.tensor_split:
            shares = (ctypes.c_float * library.llama_max_devices())(*spec.tensor_split)
            params.tensor_split = shares

        def keep_going(share: float, _: Any) -> bool:
            on_progress(share)
            return True

        progress = library.llama_progress_callback(keep_going)
        params.progress_callback = progress
        model = library.llama_model_load_from_file(os.fsencode(spec.path), params)
        if not model:
            raise EngineError(f"llama.cpp could not load {spec.path}: {self._log.last}")
        return model

    def _make_context(self, spec: LoadSpec) -> Any:
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = spec.n_ctx
        params.n_batch = spec.n_batch
        params.n_ubatch = min(spec.n_ubatch, spec.n_batch)
        params.n_seq_max = spec.n_slots
        # The default reserves a row of logits for every prompt token: 256 MiB for a 128k vocabulary.
        params.n_outputs_max = spec.n_slots
        params.n_threads = params.n_threads_batch = spec.n_threads
        params.kv_unified = True
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = {"f16": 1, "q8_0": 8, "q4_0": 2}[spec.kv_type]
        params.swa_full = False
        params.no_perf = True
        context = library.llama_init_from_model(self._model, params)
        if not context:
            raise EngineError(
                f"llama.cpp could not make a context of {spec.n_ctx} tokens: {self._log.last}",
                hint="Try a smaller --ctx.",
            )
        return context

    def _warm_up(self) -> None:
        """Touch all weights once, so that the first request does not pay for it."""
        library = self._library
        token = library.llama_vocab_bos(self._vocab)
        tokens = (library.llama_token * 1)(token if token >= 0 else 0)
        library.llama_set_warmup(self._context, True)
        library.llama_decode(self._context, library.llama_batch_get_one(tokens, 1))
        library.llama_synchronize(self._context)
        library.llama_set_warmup(self._context, False)
        library.llama_memory_clear(self._memory, True)

    def _sample(self, wanted: tuple[int, Any]) -> int:
        row, sampler = wanted
        return int(self._library.llama_sampler_sample(sampler.pointer, self._context, row))

    def _tokenize(self, text: bytes, parses_control: bool) -> list[int]:
        library = self._library
        size = len(text) + 8  # a token takes at least a byte, but for a prefix that some vocabularies add
        tokens = (library.llama_token * size)()
        n = library.llama_tokenize(self._vocab, text, len(text), tokens, size, False, parses_control)
        if n < 0:
            tokens = (library.llama_token * -n)()
            n = library.llama_tokenize(self._vocab, text, len(text), tokens, -n, False, parses_control)
        return list(tokens[:n])

    def _piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._library.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _text(self, token: int) -> str:
        return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        n = self._library.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""


class _BatchArrays:
    """The C arrays of a batch, made once; a step only overwrites their beginning."""

    def __init__(self, library: Any, n_batch: int) -> None:
        self._tokens = (library.llama_token * n_batch)()
        self._positions = (library.llama_pos * n_batch)()
        self._counts = (ctypes.c_int32 * n_batch)(*([1] * n_batch))
        self._slots = (library.llama_seq_id * n_batch)()
        self._logits = (ctypes.c_int8 * n_batch)()
        pointer = ctypes.POINTER(library.llama_seq_id)
        start, size = ctypes.addressof(self._slots), ctypes.sizeof(library.llama_seq_id)
        self._slot_pointers = (pointer * n_batch)(
            *(ctypes.cast(start + i * size, pointer) for i in range(n_batch))
        )
        self.batch = library.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=self._slot_pointers,
            logits=self._logits,
        )

    def fill(self, batch: Batch) -> list[tuple[int, Sampler]]:
        """Write the rows; (index in the batch, sampler) of each token whose successor is sampled."""
        at, wanted = 0, []
        for row in batch.rows:
            n = len(row.tokens)
            end = at + n
            self._tokens[at:end] = row.tokens
            self._positions[at:end] = range(row.start, row.start + n)
            self._slots[at:end] = [row.slot] * n
            self._logits[at:end] = [0] * n
            if row.sampler is not None:
                self._logits[end - 1] = 1
                wanted.append((end - 1, row.sampler))
            at = end
        self.batch.n_tokens = at
        return wanted


class _Log:
    """Listens to llama.cpp: the last line of trouble, and the sizes of the buffers as allocated."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._trouble: deque[str] = deque(maxlen=1)
        self.buffers: list[tuple[str, str, int]] = []

        def listen(level: int, text: bytes, _: Any) -> None:
            line = text.decode("utf-8", "replace").strip()
            found = BUFFER_LINE.search(line)
            if found:
                device, what, mib = found.groups()
                self.buffers.append((device, what, int(float(mib) * 1024 * 1024)))
            elif level == 3 and line:  # GGML_LOG_LEVEL_ERROR
                self._trouble.append(line)

        self._callback = library.llama_log_callback(listen)
        library.llama_log_set(self._callback, None)

    def close(self) -> None:
        """Stop listening; llama.cpp must not call what is gone."""
        self._library.llama_log_set(self._library.llama_log_callback(0), None)

    @property
    def last(self) -> str:
        return self._trouble[-1] if self._trouble else "no reason given"


def _choose_devices(spec: LoadSpec) -> None:
    """Show CUDA just the planned GPUs, by UUID and in the plan's order, so that numbering cannot differ."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if spec.visible_devices or spec.n_gpu_layers == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
