"""All that crosses the pipe between the parent and an engine's process. Frozen values, picklable, small.

One list of events is sent per step. Ids are chosen by the parent and never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nemolocal.types import FinishReason, GenerationParams, Prompt, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how: the engine's half of a plan.

    `n_ctx` tokens are shared by `n_slots` sequences. `visible_devices` are GPU UUIDs in the order of
    `tensor_split` (layers for each, the output layer counts as one); empty with `n_gpu_layers` 0.
    `tensor_split` empty leaves the split to llama.cpp. `n_threads` 0 leaves the number to llama.cpp.
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
    visible_devices: tuple[str, ...] = ()
    n_threads: int = 0
    n_queue: int = 512


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What llama.cpp says of the loaded model.

    `control_tokens` are the texts of the vocabulary's control tokens, longest first. `buffers` holds
    (device, what, bytes) as allocated. `chat_template` is "" when the file has none.
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
    buffers: tuple[tuple[str, str, int], ...] = ()


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


Command = Submit | Cancel | Shutdown

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
    """The model could not be loaded; the process exits after this."""

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt was tokenized, fits, and waits for a slot."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request cannot be served: `n_prompt` tokens do not fit, or `kind` says why. Its last event."""

    id: int
    kind: Literal["context_length", "invalid", "busy"]
    message: str = ""
    param: str | None = None
    n_prompt: int = 0
    n_ctx: int = 0


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
class Failed:
    """The last event of a request that the engine could not finish. `is_dead` says whether the engine ends
    with it."""

    id: int
    message: str
    is_dead: bool = True


@dataclass(frozen=True, slots=True)
class Beat:
    """A step was made and had nothing else to tell: the sign of life while a long prompt is read."""


Event = Beat | LoadProgress | Ready | LoadFailed | Accepted | Rejected | Chunk | Finished | Failed
