"""How many bytes a model takes and where: llama.cpp's own arithmetic, block by block.

Pure: knows shapes and numbers, neither machines nor choices. The formulae are those of llama.cpp as
vendored in llama-cpp-python 0.3.36; file names below are of its `src/`, unless they begin with `ggml`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from nemolocal.models import architectures
from nemolocal.models.shape import DELTA_NETS, N_EXPERTS_FUSED, UNGATED, LayerShape, ModelShape

KvType = Literal["f16", "q8_0", "q4_0"]
KvLayout = Literal["shared", "split"]

MIB: Final = 1 << 20

CUDA_CONTEXT_BYTES: Final = 530 * MIB
"""What each GPU holds beyond llama.cpp's own figures: CUDA's context, kernels, cuBLAS. Measured."""

N_CTX_STEP: Final = 256
"""A context is rounded up to a multiple of this (llama-context.cpp)."""

N_UBATCH: Final = 512
"""Tokens computed at a time where nothing else is said (llama.cpp's default)."""

N_DRAFTED: Final = 16
"""Tokens that may be guessed ahead in one step, over all sequences."""

N_GPUS_MOST: Final = 16
"""GPUs that one model can lie on (llama_max_devices)."""

KV_BLOCK: Final = 32
"""Elements of one block of a quantized cache; a head's length must be a multiple of it."""

HEAD_LENGTH_LEAST: Final = 64
"""Of the widths of a head that occur, the shortest with flash attention on a GPU."""

_BLOCK_BYTES: Final = {"f16": 64, "q8_0": 34, "q4_0": 18}  # of KV_BLOCK elements
_ACTIVATION_RESERVE: Final = 1.065  # what the allocator loses between tensors of unlike size
_SCAN_RESERVE: Final = 1.07  # the same between the tensors of a Mamba block, a gated delta net's
_DELTA_RESERVE: Final = 1.02
_SMALL_BYTES: Final = 3 << 18  # positions, indices and other inputs
_N_PIPELINE_COPIES: Final = 4  # GGML_SCHED_MAX_COPIES


@dataclass(frozen=True, slots=True)
class Load:
    """How a model is loaded: `n_slots` sequences of up to `n_ctx` tokens, which share so many cells or have
    as many each, with prompts read `n_ubatch` tokens at a time."""

    n_ctx: int
    n_slots: int
    kv_type: KvType = "f16"
    n_ubatch: int = N_UBATCH
    kv_layout: KvLayout = "shared"

    @property
    def n_cells(self) -> int:
        """Cells that one sequence can reach."""
        return pad_ctx(self.n_ctx)

    @property
    def n_streams(self) -> int:
        """How many times the cells are there (llama-kv-cache.cpp, n_stream)."""
        return self.n_slots if self.kv_layout == "split" else 1

    @property
    def n_tokens(self) -> int:
        """Tokens of the largest batch that is computed at once."""
        return min(self.n_ubatch, self.n_cells)


def load_of(shape: ModelShape, *, n_ctx: int, n_slots: int, kv_type: KvType) -> Load:
    """A load of `n_ctx` tokens. A model that reads its inputs whole takes the longest in one batch."""
    return Load(n_ctx, n_slots, kv_type, n_ctx if shape.reads_whole else N_UBATCH)


def pad_ctx(n_ctx: int) -> int:
    return -(-n_ctx // N_CTX_STEP) * N_CTX_STEP


def kv_bytes(layer: LayerShape, load: Load) -> int:
    """Keys and values of one block, with flash attention.

    streams * cells * (key row + value row) (llama-kv-cache.cpp). A block with a sliding window keeps that
    window for each sequence, and one batch (llama-kv-cache-iswa.cpp, with swa_full off).
    """
    n_elements = layer.n_embd_k_gqa + layer.n_embd_v_gqa
    return load.n_streams * _n_cells(layer, load) * n_elements * _BLOCK_BYTES[load.kv_type] // KV_BLOCK


def state_bytes(layer: LayerShape, load: Load) -> int:
    """Recurrent state of one block for all sequences (llama-memory-recurrent.cpp)."""
    return layer.state_bytes * load.n_slots


def _n_cells(layer: LayerShape, load: Load) -> int:
    if not layer.n_swa:
        return load.n_cells
    n_windows = load.n_slots // load.n_streams
    return pad_ctx(min(load.n_cells, layer.n_swa * n_windows + load.n_ubatch))


def compute_bytes(shape: ModelShape, load: Load, *, is_gpu: bool) -> int:
    """The buffer for what is computed between the weights, on a device that runs any of the blocks.

    An upper estimate (llama-context.cpp, sched_reserve) of the most that is alive at once: the attention mask
    beside the widest feed-forward block's activations for one batch, a recurrent block's with a copy of its
    state for each sequence, or an attention block's; or else, when the mask is no longer needed, the logits
    of one token for each sequence and of all guesses, or of all tokens where they are pooled. On a GPU, flash
    attention over a quantized cache keeps an f16 copy of one block's keys and values (ggml-cuda/fattn.cu).
    The factors were fitted to what llama.cpp reserves for the catalogue's shapes, on a CPU and on a GPU.
    """
    n_embd_q = max(shape.n_head_max * shape.head_length, shape.n_embd)
    n_copied, n_beside, n_feed_forward = 0, 0, shape.n_activations_max
    if is_gpu and not shape.pooling:  # the embedded batch lies among its inputs; seen with those that write
        n_feed_forward += shape.n_activations_kept - shape.n_embd
    if load.kv_type != "f16":
        if is_gpu:
            rows = (_n_cells(x, load) * (x.n_embd_k_gqa + x.n_embd_v_gqa) for x in shape.layers)
            n_copied = max(rows, default=0)
            # Where that copy was, the experts' outputs do not all fit; fitted.
            n_beside = shape.n_expert_used * shape.n_embd if shape.n_expert_used <= N_EXPERTS_FUSED else 0
        elif shape.n_head_max * shape.head_length == shape.n_embd and not (
            shape.n_expert or shape.state_bytes
        ):
            n_feed_forward -= shape.n_embd  # turned queries and keys leave one tensor less alive
    n_logits = 0 if shape.architecture in architectures.ENCODERS else shape.n_vocab * n_outputs(shape, load)
    if is_gpu and not shape.pooling:
        n_logits *= 2  # picking the candidates there takes a padded copy (llama-graph.cpp, build_sampling)
    activations = max(
        _ACTIVATION_RESERVE * 4 * load.n_tokens * n_feed_forward,
        _recurrent_bytes(shape, load),
        4 * load.n_tokens * (5 * n_embd_q + n_beside) + 2 * n_copied,
    )
    scores = _score_bytes(shape, load) if is_gpu else 0
    n_logits += shape.n_embd * (load.n_tokens + n_outputs(shape, load))
    logits = (_ACTIVATION_RESERVE if shape.pooling else 1) * 4 * n_logits
    return round(max(activations + mask_bytes(shape, load) + scores, logits)) + _SMALL_BYTES


def _recurrent_bytes(shape: ModelShape, load: Load) -> float:
    """What a recurrent block holds at once: its activations, and the new state of each sequence; a gated
    delta net the old one too (models/mamba-base.cpp and delta-net-base.cpp)."""
    state_bytes = load.n_slots * max((layer.state_bytes for layer in shape.layers), default=0)
    is_delta = shape.architecture in DELTA_NETS
    n_bytes = 4 * load.n_tokens * shape.n_activations_recurrent + (2 if is_delta else 1) * state_bytes
    return (_DELTA_RESERVE if is_delta else _SCAN_RESERVE) * n_bytes


def n_outputs(shape: ModelShape, load: Load) -> int:
    """Tokens of which a row of logits is handed out: one of each sequence and all guesses, or with embeddings
    all of a batch, even where nobody wants it (llama-context.cpp, decode and output_reserve)."""
    return load.n_tokens if shape.pooling else load.n_slots + N_DRAFTED


def _score_bytes(shape: ModelShape, load: Load) -> int:
    """Attention scores of an encoder whose heads are too short for flash attention on a GPU, in f32."""
    is_encoder = shape.architecture in architectures.ENCODERS and shape.n_head_max > 0
    if not is_encoder or shape.n_embd // shape.n_head_max >= HEAD_LENGTH_LEAST:
        return 0
    return 4 * shape.n_head_max * load.n_tokens**2


def mask_bytes(shape: ModelShape, load: Load) -> int:
    """The attention mask in f16, and a second one where some blocks have a window, however many cells that
    leaves (llama-graph.cpp). Encoders look at the batch, not at a cache."""
    windows = {layer.n_swa: _n_cells(layer, load) for layer in shape.layers if layer.n_embd_k_gqa}
    if shape.architecture in architectures.ENCODERS:
        windows = {0: load.n_tokens}
    return 2 * load.n_tokens * sum(windows.values())


def pipeline_bytes(shape: ModelShape, load: Load) -> int:
    """What each of several GPUs holds more when they hold the whole model: further copies of the mask and
    the embedded batch, so that one can begin while another works (llama-context.cpp; ggml-backend.cpp)."""
    return (_N_PIPELINE_COPIES - 1) * (mask_bytes(shape, load) + 4 * shape.n_embd * load.n_tokens)


def offload_bytes(shape: ModelShape, n_host_layers: int, host_experts: Collection[int] = ()) -> int:
    """What a GPU holds more when the first `n_host_layers`, or the experts of other blocks, lie in RAM: to
    read a prompt, their matrices are copied to it (ggml-backend.cpp, op_offload), one of a block's at a time,
    but the experts together."""
    n_parts = 2 if shape.architecture in UNGATED else 3
    sizes = [x.weights_bytes if x.expert_bytes else x.weights_bytes // n_parts for x in shape.layers]
    sizes = [*sizes[:n_host_layers], *(shape.layers[il].expert_bytes for il in host_experts)]
    return max(sizes, default=0)


def host_bytes(shape: ModelShape, load: Load, *, is_computing: bool) -> int:
    """What RAM holds besides weights, cache and `compute_bytes`: the logits that are handed out
    (llama-context.cpp, output_reserve), and where GPUs compute everything, the embedded batch and the mask,
    which else lie in the buffer of what RAM computes."""
    logits = 4 * shape.n_vocab * n_outputs(shape, load)
    return logits if is_computing else logits + 8 * shape.n_embd * load.n_tokens + mask_bytes(shape, load)
