"""All that crosses the pipe between the parent and an engine's process. Frozen values, picklable, small.

One list of events is sent per step. Ids are chosen by the parent and never used twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nemolocal.types import FinishReason, GenerationParams, Prompt, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how: the engine's half of a plan.

    `n_slots` sequences of up to `n_ctx` tokens each. `visible_devices` are GPU UUIDs in the order of
    `tensor_split` (layers for each, the output layer counts as one); empty with `n_gpu_layers` 0.
    `tensor_split` empty leaves the split to llama.cpp. The experts of the blocks in `host_experts` stay in
    RAM, wherever the block is. `n_threads` 0 leaves the number to llama.cpp; on several NUMA nodes
    the threads are spread over them.

    With `kv_layout` "shared" all slots share `n_ctx` cells, and one sequence may take them all; with "split"
    each slot has `n_ctx` cells of its own, which is faster for many at a time. `n_drafted` tokens may be
    guessed ahead in one step: `draft` is the file of a small model that guesses, or "ngram", which looks up
    what followed the same words before, or "off". `adapters` are LoRA files and the scale that each has where
    a request does not say. `sampling` "auto" lets a GPU pick the candidates. `warm_folder` keeps states of
    long prompts for later processes, `warm_key` says for which model and plan they hold, and `warm_bytes`
    limits the folder; "" keeps none. `state_bytes` of RAM hold states of what does not run: idle
    slots, and borders of texts that cannot be rolled back to otherwise.

    With a `pooling` the model embeds or ranks: up to `n_slots` inputs in one batch, none longer than `n_ctx`.
    `n_ubatch` below `n_ctx` says that a longer one may be read in parts.
    """

    path: str
    n_ctx: int
    n_slots: int
    n_batch: int = 2048
    n_ubatch: int = 512
    kv_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    n_gpu_layers: int = 0
    split_mode: Literal["none", "layer", "tensor"] = "layer"
    tensor_split: tuple[float, ...] = ()
    host_experts: tuple[int, ...] = ()
    visible_devices: tuple[str, ...] = ()
    n_threads: int = 0
    n_numa_nodes: int = 1
    n_queue: int = 512
    kv_layout: Literal["shared", "split"] = "shared"
    n_drafted: int = 16
    draft: str = "ngram"
    adapters: tuple[tuple[str, float], ...] = ()
    sampling: Literal["auto", "device", "host"] = "auto"
    warm_folder: str = ""
    warm_key: str = ""
    warm_bytes: int = 0
    state_bytes: int = 2 << 30
    pooling: Literal["", "mean", "cls", "last", "rank"] = ""


@dataclass(frozen=True, slots=True)
class Held:
    """What llama.cpp has allocated for a model on one device, a GPU's UUID or "" for the RAM, in bytes as
    exact as its log, which rounds to 0.01 MiB. `output_bytes` are the rows that it hands out, and
    `beside_bytes` the draft model and the adapters. Weights of which some `is_mapped` are counted from the
    first to the last that are there, in pages that come and go."""

    device: str
    weights_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    beside_bytes: int = 0
    is_mapped: bool = False

    @property
    def total_bytes(self) -> int:
        cache_bytes = self.kv_bytes + self.state_bytes
        buffer_bytes = self.compute_bytes + self.output_bytes
        return self.weights_bytes + cache_bytes + buffer_bytes + self.beside_bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """An allocation that failed: `wanted_bytes` were asked of a device, where llama.cpp held `held_bytes` for
    this model already and `free_bytes` were free (None where that was not told)."""

    device: str
    wanted_bytes: int
    free_bytes: int | None
    held_bytes: int


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """What to quantize, by absolute paths, of which the target's name is ASCII: `file_type` is llama.cpp's
    number of the quantization (llama_ftype). A dry run only says what would become of each tensor.
    `may_requantize` allows what is quantized already to lose more. `importance` has by a tensor's name one
    float32 for each column; `buffer_bytes` is how much of a tensor is in memory at a time, 0 for the
    library's own choice."""

    source: str
    target: str
    file_type: int
    n_threads: int = 0
    is_dry: bool = False
    may_requantize: bool = False
    importance: Mapping[str, bytes] = field(default_factory=dict)
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TensorDone:
    """One of `n_all` tensors, of the type `before`, became the type `after`; `dims` begins with the length
    of a row. `wanted` is the type that it should have become, where its rows are no whole blocks of that.
    Types have ggml's names, such as "f16" and "q4_K"."""

    number: int
    n_all: int
    name: str
    dims: tuple[int, ...]
    before: str
    after: str
    wanted: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What llama.cpp says of the loaded model.

    `control_tokens` are the texts of the vocabulary's control tokens, longest first. `held` is what was
    allocated on each device. `chat_template` is "" when the file has none. `n_embd` is
    the length of the vectors that an embedding model gives.
    """

    name: str
    architecture: str
    n_ctx: int
    n_ctx_train: int
    n_params: int
    size_bytes: int
    n_vocab: int
    bos: str
    eos: str
    adds_bos: bool
    control_tokens: tuple[str, ...]
    chat_template: str
    library: str
    system_info: str
    held: tuple[Held, ...] = ()
    n_embd: int = 0


# Parent to child ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate. Answered by Accepted or Rejected, then Chunks, then exactly one Finished or Failed."""

    id: int
    prompt: Prompt
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request; nothing more is sent for it. Unknown ids are ignored."""

    id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Free everything and exit."""


@dataclass(frozen=True, slots=True)
class Embed:
    """Turn each input, a text or token ids, into a vector. Answered by one Embedded, Rejected or Failed."""

    id: int
    inputs: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """Say how well each document answers the query. Answered by one Ranked, Rejected or Failed."""

    id: int
    query: str
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """Say how many tokens each text is, with no control tokens in it. Answered by one Counted or Failed."""

    id: int
    texts: tuple[str, ...]


Command = Submit | Count | Cancel | Shutdown
EmbeddingCommand = Embed | Rank | Cancel | Shutdown

# Child to parent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Share of the weights that is loaded, 0 to 1."""

    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; requests are served from now on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model could not be loaded; the process exits after this. `shortage` is what there was too little
    of, where it was that and is known."""

    message: str
    hint: str = ""
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt was tokenized, fits, and waits for a slot."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request cannot be served: `n_prompt` tokens do not fit, or `kind` says why. Its last event. Of
    several inputs the one at `index` is at fault."""

    id: int
    kind: Literal["context_length", "invalid", "busy"]
    message: str = ""
    param: str | None = None
    n_prompt: int = 0
    n_ctx: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of a request, whole characters only; `n_tokens` is how many tokens it took."""

    id: int
    text: str
    n_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well."""

    id: int
    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of all inputs in their order: float32, little-endian, of length 1 by the L2 norm."""

    id: int
    vectors: tuple[bytes, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Ranked:
    """The scores of all documents in their order, each from 0 to 1."""

    id: int
    scores: tuple[float, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Counted:
    """The tokens of all texts in their order."""

    id: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that the engine could not finish. `is_dead` says whether the engine ends
    with it."""

    id: int
    message: str
    is_dead: bool = True


@dataclass(frozen=True, slots=True)
class Beat:
    """A step was made and had nothing else to tell: the sign of life while a long prompt is read."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the engine is: requests that have a slot, requests that wait for one, and the cells of the KV
    cache, of which `n_taken_cells` hold what is being read and written or what is remembered. Told when it
    changed, once a second at most and whenever nothing is left to do."""

    n_running: int = 0
    n_waiting: int = 0
    n_cells: int = 0
    n_taken_cells: int = 0


Event = (
    Beat
    | Occupancy
    | LoadProgress
    | Ready
    | LoadFailed
    | Accepted
    | Rejected
    | Chunk
    | Finished
    | Embedded
    | Ranked
    | Counted
    | Failed
)
