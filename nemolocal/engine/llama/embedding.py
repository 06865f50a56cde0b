"""`EmbeddingBackend` on llama.cpp: a context that pools the tokens of each input to a vector or a score."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nemolocal.engine.backend import Row
from nemolocal.engine.llama.arrays import BatchArrays
from nemolocal.engine.llama.backend import KV_TYPES
from nemolocal.engine.llama.inputs import Inputs
from nemolocal.engine.llama.library import Log, describe, load_library, load_model, metadata, open_context
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.engine.messages import LoadSpec, ModelInfo
from nemolocal.errors import EngineError

POOLINGS = {"mean": 1, "cls": 2, "last": 3, "rank": 4}  # enum llama_pooling_type
N_PACKED_CPU = 512  # more tokens at once keep others waiting and are read no faster
N_PACKED_GPU = 2048
RANKS_IN_PROBABILITIES = ("qwen3", "qwen3vl")  # their score is that of a "yes" against a "no"


class LlamaEmbedder:
    """One model and its context.

    Raises EngineError when the file cannot be loaded or the memory does not suffice, with llama.cpp's own
    last word on it. `on_progress` gets the loaded share of the weights, 0 to 1.
    """

    def __init__(self, spec: LoadSpec, on_progress: Callable[[float], None]) -> None:
        self._library = library = load_library(spec)
        self._log = Log(library, spec.visible_devices)
        self._number = self._log.allocated.begin()
        self._model = load_model(library, spec, self._log, on_progress)
        self._vocab = LlamaVocab(library, self._model)
        self.can_rank = spec.pooling == "rank"
        # A position beyond those that the model has learned would be read from beyond its table.
        self.n_ctx = min(spec.n_ctx, int(library.llama_model_n_ctx_train(self._model)))
        self.n_slots = spec.n_slots
        self.n_batch = min(spec.n_ubatch, self.n_ctx)
        self.n_packed = N_PACKED_CPU if spec.n_gpu_layers == 0 else N_PACKED_GPU
        self._context = self._make_context(spec)
        self._memory = library.llama_get_memory(self._context)
        if not (self._memory and library.llama_get_causal_attn(self._context)):
            self.n_ctx = self.n_batch  # such an input cannot be read in parts, whatever the plan says
        self._is_encoder = not self._memory or library.llama_model_has_encoder(self._model)
        counts = library.llama_model_n_cls_out if self.can_rank else library.llama_model_n_embd_out
        self._n_values = int(counts(self._model))
        self._architecture = metadata(library, self._model, "general.architecture")
        layout = library.llama_model_chat_template(self._model, b"rerank") or b""
        self._inputs = Inputs(library, self._vocab, layout=layout.decode("utf-8", "replace"))
        self._arrays = BatchArrays(library, self.n_batch)
        self.on_life: Callable[[], None] = lambda: None

        def go_on(_: Any) -> bool:
            self.on_life()
            return False

        self._go_on = library.ggml_abort_callback(go_on)
        self._never = library.ggml_abort_callback(0)
        self._warm_up()

    # EmbeddingBackend ----------------------------------------------------------------------------

    def tokenize(self, text: str | tuple[int, ...]) -> list[int]:
        return self._inputs.of_text(text) if isinstance(text, str) else self._inputs.of_tokens(text)

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        return self._inputs.of_pair(query, document)

    def compute(self, rows: list[Row]) -> list[bytes]:
        library = self._library
        if self._memory and rows[0].start == 0:
            library.llama_memory_clear(self._memory, False)
        # Asked after each operation of a CPU; only for long batches, as it takes the interpreter's lock.
        is_long = sum(len(row.tokens) for row in rows) > self.n_packed
        library.llama_set_abort_callback(self._context, self._go_on if is_long else self._never, None)
        read = library.llama_encode if self._is_encoder else library.llama_decode
        self._arrays.write(rows, [len(row.tokens) for row in rows])
        result = read(self._context, self._arrays.batch)
        if result != 0:
            raise EngineError(f"The model could not compute a batch ({result}). {self._log.last}")
        library.llama_synchronize(self._context)
        return [self._pooled(row.slot) for row in rows]

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)
        self._log.close()

    # What the parent is told ---------------------------------------------------------------------

    def info(self) -> ModelInfo:
        info = describe(
            self._library,
            self._model,
            self._vocab,
            n_ctx=self.n_ctx,
            held=self._log.allocated.held(self._number),
            n_embd=0 if self.can_rank else self._n_values,
        )
        return replace(info, chat_template="")  # nobody chats with it

    # Inside --------------------------------------------------------------------------------------

    def _make_context(self, spec: LoadSpec) -> Any:
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = self.n_ctx
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = spec.n_slots
        params.n_threads = params.n_threads_batch = spec.n_threads
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = POOLINGS[spec.pooling]
        # Where a GPU has it: the heads of small encoders are too short, and a CPU would have to help out. A
        # quantized cache cannot do without.
        params.flash_attn_type = (
            library.LLAMA_FLASH_ATTN_TYPE_AUTO
            if spec.kv_type == "f16"
            else library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        params.type_k = params.type_v = KV_TYPES[spec.kv_type]
        return open_context(library, self._model, params, n_ctx=self.n_ctx, log=self._log)

    def _warm_up(self) -> None:
        """Touch all weights once, so that the first request does not pay for it."""
        self._library.llama_set_warmup(self._context, True)
        self.compute([Row(0, 0, [self._vocab.first_token])])
        self._library.llama_set_warmup(self._context, False)

    def _pooled(self, slot: int) -> bytes:
        pointer = self._library.llama_get_embeddings_seq(self._context, slot)
        values = [float(value) for value in pointer[: self._n_values]]
        if not all(map(math.isfinite, values)):
            return b""
        found = [self._score(values)] if self.can_rank else _normalised(values)
        return struct.pack(f"<{len(found)}f", *found)

    def _score(self, values: list[float]) -> float:
        """The first class is that of what fits; most rerankers give its logit."""
        if self._architecture in RANKS_IN_PROBABILITIES and self._n_values > 1:
            return values[0]
        return 0.5 * (1.0 + math.tanh(0.5 * values[0]))  # the sigmoid, without its overflow


def _normalised(values: list[float]) -> list[float]:
    """Of length 1 by the L2 norm; a vector of zeros stays one."""
    length = math.sqrt(math.fsum(value * value for value in values))
    return [value / length for value in values] if length else values
