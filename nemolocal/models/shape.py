"""The shape of a model, layer by layer: what the memory plan needs to know and nothing more.

A shape comes from a GGUF header (`gguf.read`) or, before the first byte is downloaded, from the published
dimensions of the model and the size of the file (`estimate`). Knows nothing of hardware, contexts or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Literal

N_BYTES_F32 = 4

Pooling = Literal["", "mean", "cls", "last", "rank"]
"""How the tokens of an input become one vector, or with "rank" one score; "" for models that write text."""

UNGATED = frozenset({"nemotron", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose feed-forward blocks have no gate: squared ReLU, so two matrices and not three."""

N_EXPERTS_FUSED = 15
"""Experts of a token whose outputs CUDA adds in one go (ggml-cuda.cu)."""

DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose recurrent blocks are gated delta nets, and whose queries come with a gate as wide."""


class LayerKind(Flag):
    """What a block `blk.N` does. A block of most models is ATTENTION | MLP; a block of the Nemotron
    hybrids is one thing alone; a block without any is a pass-through."""

    NONE = 0
    ATTENTION = auto()  # keeps keys and values for each token
    RECURRENT = auto()  # keeps a state of fixed size for each sequence
    MLP = auto()
    MOE = auto()


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One block.

    `weights_bytes` counts all its tensors, `expert_bytes` the part of them that lies in experts of which
    only some are read for each token. `n_embd_k_gqa` and `n_embd_v_gqa` are the elements of one token's key
    and value row (head length times KV heads), 0 without a KV cache of its own. `state_bytes` is the
    recurrent state of one sequence, always float32. `n_swa` is the sliding window in tokens, 0 for
    attention over the whole context.
    """

    kind: LayerKind
    weights_bytes: int
    n_embd_k_gqa: int = 0
    n_embd_v_gqa: int = 0
    state_bytes: int = 0
    expert_bytes: int = 0
    n_swa: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the plan sees it.

    `input_bytes` are the token embeddings, which llama.cpp always keeps in RAM; `output_bytes` are the
    output norm and matrix, which go to the last GPU: where the embeddings are tied (`is_tied`) they are
    counted there a second time, as llama.cpp makes a second copy. `layers` leaves out the `n_extra_layers`
    appended for multi-token prediction, whose `extra_bytes` are in the file but not loaded; they do count
    in llama.cpp's layer numbers.

    `n_head_max` is the largest of any layer; `n_activations_max` is the number of float32
    elements that the widest feed-forward block holds of one token at once, `n_activations_kept` those that a
    GPU holds beside them, `n_activations_recurrent` those of a recurrent block. `head_length` is that of keys
    (0 when there is no attention).

    `is_assumed` marks a stand-in for a shape that is not known yet. `reads_whole` says that a model with a
    `pooling` needs each input whole in one batch, since its tokens see those after them or all of them are
    pooled.
    """

    architecture: str
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    layers: tuple[LayerShape, ...]
    input_bytes: int
    output_bytes: int
    is_tied: bool = False
    n_extra_layers: int = 0
    extra_bytes: int = 0
    n_head_max: int = 0
    n_activations_max: int = 0
    n_activations_kept: int = 0
    n_activations_recurrent: int = 0
    head_length: int = 0
    n_params: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    pooling: Pooling = ""
    reads_whole: bool = False
    is_assumed: bool = False

    @property
    def n_layer(self) -> int:
        """Blocks that are computed, without those for multi-token prediction."""
        return len(self.layers)

    @property
    def n_layer_all(self) -> int:
        """Blocks by llama.cpp's count: the output layer has this number."""
        return len(self.layers) + self.n_extra_layers

    @property
    def repeating_bytes(self) -> int:
        """Weights of all blocks."""
        return sum(layer.weights_bytes for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence over all blocks."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def active_bytes(self) -> int:
        """Weights that one token reads: of the experts only the share that is chosen."""
        experts = sum(layer.expert_bytes for layer in self.layers)
        chosen = experts * self.n_expert_used // self.n_expert if self.n_expert else 0
        return self.repeating_bytes - experts + chosen + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Published dimensions of a model, as a catalogue row holds them.

    `layers` is the number of equal blocks (attention and a feed-forward or mixture-of-experts part), or a
    string with one letter for each block: M Mamba-2, * attention, - feed-forward, E mixture of experts.
    With `n_full`, every so many-th of equal blocks attends to all that came before; the others have a
    recurrent state, where `ssm_d_inner` says how wide, or look back over `n_swa` tokens, with heads as long
    as `head_dim_swa`. The last `n_layer_shared` keep nothing and use the cells of earlier ones.
    `n_head_kv` and `n_ff` are one number or one for each block, where 0 means that the block lacks that
    part. `head_dim` 0 means `n_embd / n_head`. `n_ff_expert` is the inner width of one expert,
    `n_ff_shared` that of the experts every token passes through, `n_latent` the width that experts work
    in when it is not `n_embd`. `n_ctx_train` is in tokens. `n_extra_layers` are the blocks for multi-token
    prediction in the file: one attention, one set of experts, and the matrix that feeds them. `is_tied`
    means that the file has no output matrix of its own. `n_embd_per_layer` is the width of embeddings that
    each block adds of its own, and `pooling` is what a model that embeds or ranks does with its tokens.
    """

    architecture: str
    layers: int | str
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int | tuple[int, ...]
    head_dim: int = 0
    n_ff: int | tuple[int, ...] = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    n_latent: int = 0
    ssm_d_conv: int = 4
    ssm_d_inner: int = 0
    ssm_d_state: int = 0
    ssm_n_group: int = 8
    ssm_n_head: int = 0
    n_extra_layers: int = 0
    is_tied: bool = False
    n_full: int = 0
    n_swa: int = 0
    head_dim_swa: int = 0
    n_layer_shared: int = 0
    n_embd_per_layer: int = 0
    pooling: Pooling = ""


def mamba_state_bytes(*, d_conv: int, d_inner: int, d_state: int, n_group: int) -> int:
    """State of one sequence in one Mamba-2 block: the tail of the convolution and the SSM state, in f32.

    llama.cpp src/llama-hparams.cpp, n_embd_r and n_embd_s.
    """
    conv_tail = max(d_conv - 1, 0) * (d_inner + 2 * n_group * d_state)
    return N_BYTES_F32 * (conv_tail + d_state * d_inner)


def mlp_activations(architecture: str, *, n_embd: int, n_ff: int, n_embd_q: int) -> int:
    """Float32 elements of one token that a feed-forward block holds at once: gate, up and their product
    (squared in place where there is no gate), the stream and its branch. `n_embd_q` is the width of the
    queries, of those with a window where there are such. Fitted to llama.cpp's buffers."""
    n_inner = (1 if architecture in UNGATED else 3) * n_ff
    if architecture in DELTA_NETS:
        return n_inner + 3 * n_embd
    return n_inner + 4 * n_embd + max(n_embd_q - n_embd, 0)


def moe_activations(
    architecture: str,
    *,
    n_embd: int,
    n_embd_expert: int,
    n_ff_used: int,
    n_expert_used: int,
    n_embd_q: int,
) -> int:
    """The same of a mixture of experts, whose outputs are held apart until they are weighed and added.
    `n_ff_used` is the inner width of all experts that one token uses."""
    if architecture == "gpt-oss":  # nothing is held beside their inner widths
        return mlp_activations(architecture, n_embd=n_embd, n_ff=n_ff_used, n_embd_q=n_embd_q)
    n = (1 if architecture in UNGATED else 3) * n_ff_used + n_expert_used * n_embd_expert
    if architecture == "gemma4":
        return n + 3 * n_embd + max(n_embd_q - n_embd, 0)
    if architecture in UNGATED:
        return n + 9 * n_embd // 2
    return n + (4 if architecture in DELTA_NETS else 5) * n_embd


def kept_activations(architecture: str, *, n_embd_expert: int, n_ff_used: int, n_expert_used: int) -> int:
    """What CUDA keeps longer: the outputs of up to 15 experts, until they are weighed and added in one go. It
    costs more only where the weighed ones do not fit where the inner widths were (ggml-cuda.cu,
    graph_optimize)."""
    n_outputs = n_expert_used * n_embd_expert
    n_inner = (1 if architecture in UNGATED else 3) * n_ff_used
    return n_outputs if n_expert_used <= N_EXPERTS_FUSED and n_outputs > n_inner else 0


def per_layer_activations(n_embd_per_layer: int, n_layer: int) -> int:
    """What stays beside both where each block adds embeddings of its own."""
    return 3 * n_embd_per_layer * n_layer // 2


def mamba_activations(architecture: str, *, n_embd: int, d_inner: int, n_conv: int, n_head: int) -> int:
    """The same of a recurrent block: its projection, three of the convolution's width, and its output.
    `n_conv` is that width. Twice as much for designs that were not measured."""
    if architecture in DELTA_NETS:
        return 3 * n_conv + d_inner + n_embd
    n = (d_inner + n_conv + n_head) + 3 * n_conv + d_inner + n_embd
    return n if architecture in UNGATED else 2 * n


def estimate(dimensions: Dimensions, *, file_bytes: int) -> ModelShape:
    """The shape of a file that is not here yet.

    The file's real size is shared out in proportion to the parameters of each part, so the whole is exact
    and a part is off by what its quantization differs from the mean (about a tenth). KV rows and states
    are exact. Raises ValueError when a list of the row does not have one number for each block.
    """
    d = dimensions
    kinds = layer_kinds(d)
    n_params = [_block_params(d, kind, il) for il, kind in enumerate(kinds)]
    n_extra_params = d.n_extra_layers * (
        _attention_params(d, max(_per_layer(d.n_head_kv, len(kinds))), _head_length(d))
        + _moe_params(d)
        + _expert_params(d)
        + 2 * d.n_embd * d.n_embd  # joins the stream with the embedding of the token before
    )
    n_embedding_params = d.n_vocab * d.n_embd
    n_more_params = d.n_vocab * d.n_embd_per_layer * len(kinds)  # embeddings, which stay in RAM too
    n_params_all = sum(n_params) + n_extra_params + n_embedding_params * (1 if d.is_tied else 2)
    n_params_all += n_more_params
    bytes_per_param = file_bytes / n_params_all
    embedding_bytes = round(n_embedding_params * bytes_per_param)
    return ModelShape(
        architecture=d.architecture,
        n_ctx_train=d.n_ctx_train,
        n_embd=d.n_embd,
        n_vocab=d.n_vocab,
        layers=tuple(
            _layer(d, kind, il, round(n * bytes_per_param), bytes_per_param)
            for il, (kind, n) in enumerate(zip(kinds, n_params, strict=True))
        ),
        input_bytes=embedding_bytes + round(n_more_params * bytes_per_param),
        output_bytes=embedding_bytes,
        is_tied=d.is_tied,
        n_extra_layers=d.n_extra_layers,
        extra_bytes=round(n_extra_params * bytes_per_param),
        n_head_max=d.n_head,
        n_activations_max=_activations(d),
        n_activations_kept=_kept_activations(d),
        n_activations_recurrent=_recurrent_activations(d),
        head_length=_head_length(d),
        n_params=n_params_all,
        n_expert=d.n_expert,
        n_expert_used=d.n_expert_used,
        pooling=d.pooling,
        reads_whole=d.pooling in ("mean", "cls"),
    )


_ASSUMED_N_LAYER = 64
_ASSUMED_N_EMBD = 5120
_ASSUMED_N_VOCAB = 262_144
_ASSUMED_N_ROW = 1024
_ASSUMED_N_EXPERT = 128


def assume(
    *, file_bytes: int, n_params: int, n_active_params: int, n_ctx_train: int, pooling: Pooling = ""
) -> ModelShape:
    """A stand-in for a model of which only the size is known: as deep as models of tens of billions of
    parameters, with keys and values in every layer, so that a plan made with it takes too much rather than
    too little. Of a mixture of experts, half of what a token reads is taken to be outside the experts.
    """
    n_dense = n_active_params // 2 if n_active_params < n_params else n_params
    expert_share = 1 - n_dense / n_params
    n_layer = max(8, min(_ASSUMED_N_LAYER, round(16 * (n_params / 1e9) ** 0.4)))
    n_embd = min(_ASSUMED_N_EMBD, max(512, round((n_params / 1e9) ** 0.5 * 1024) // 256 * 256))
    embedding_bytes = min(round(_ASSUMED_N_VOCAB * n_embd * file_bytes / n_params), file_bytes // 4)
    each = (file_bytes - 2 * embedding_bytes) // n_layer
    is_sparse = expert_share > 0
    layer = LayerShape(
        kind=LayerKind.ATTENTION | (LayerKind.MOE if is_sparse else LayerKind.MLP),
        weights_bytes=each,
        n_embd_k_gqa=min(_ASSUMED_N_ROW, n_embd),
        n_embd_v_gqa=min(_ASSUMED_N_ROW, n_embd),
        expert_bytes=round(each * expert_share),
    )
    n_used = round(_ASSUMED_N_EXPERT * (n_active_params - n_dense) / max(n_params - n_dense, 1))
    return ModelShape(
        architecture="",
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_vocab=_ASSUMED_N_VOCAB,
        layers=(layer,) * n_layer,
        input_bytes=embedding_bytes,
        output_bytes=file_bytes - embedding_bytes - each * n_layer,
        n_head_max=n_embd // 128,
        n_activations_max=mlp_activations("", n_embd=n_embd, n_ff=4 * n_embd, n_embd_q=n_embd),
        head_length=128,
        n_params=n_params,
        n_expert=_ASSUMED_N_EXPERT if is_sparse else 0,
        n_expert_used=max(n_used, 1) if is_sparse else 0,
        pooling=pooling,
        reads_whole=bool(pooling),
        is_assumed=True,
    )


_LETTERS = {
    "M": LayerKind.RECURRENT,
    "*": LayerKind.ATTENTION,
    "-": LayerKind.MLP,
    "E": LayerKind.MOE,
}


def layer_kinds(d: Dimensions) -> tuple[LayerKind, ...]:
    """What each block does. Raises ValueError for letters and lists that make no sense."""
    if isinstance(d.layers, str):
        unknown = set(d.layers) - set(_LETTERS)
        if unknown or not d.layers:
            raise ValueError(f"layers {d.layers!r} is not made of the letters M, *, - and E")
        _per_layer(d.n_ff, len(d.layers))  # as many as there are letters
        return tuple(_LETTERS[letter] for letter in d.layers)
    n_head_kv = _per_layer(d.n_head_kv, d.layers)
    n_ff = _per_layer(d.n_ff, d.layers)
    feed_forward = [
        LayerKind.MOE if d.n_expert else LayerKind.MLP if n_ff[il] else LayerKind.NONE
        for il in range(d.layers)
    ]
    return tuple(
        (
            LayerKind.RECURRENT
            if d.ssm_d_inner and not is_full(d, il)
            else LayerKind.ATTENTION
            if n_head_kv[il]
            else LayerKind.NONE
        )
        | feed_forward[il]
        for il in range(d.layers)
    )


def is_full(d: Dimensions, il: int) -> bool:
    """Whether a block attends to all that came before."""
    return not d.n_full or il % d.n_full == d.n_full - 1


def _per_layer(value: int | Sequence[int], n_layer: int) -> Sequence[int]:
    if isinstance(value, int):
        return [value] * n_layer
    if len(value) != n_layer:
        raise ValueError(f"{len(value)} numbers given for {n_layer} blocks")
    return value


def _n_layer(d: Dimensions) -> int:
    return d.layers if isinstance(d.layers, int) else len(d.layers)


def _head_length(d: Dimensions) -> int:
    return d.head_dim or d.n_embd // d.n_head


def _n_matrices(d: Dimensions) -> int:
    return 2 if d.architecture in UNGATED else 3


def _length(d: Dimensions, il: int) -> int:
    return _head_length(d) if is_full(d, il) else d.head_dim_swa or _head_length(d)


def _attention_params(d: Dimensions, n_head_kv: int, length: int) -> int:
    n_gates = d.n_head if d.architecture in DELTA_NETS else 0
    return d.n_embd * length * (2 * (d.n_head + n_head_kv) + n_gates)


def _expert_params(d: Dimensions) -> int:
    return d.n_expert * d.n_ff_expert * (d.n_latent or d.n_embd) * _n_matrices(d)


def _moe_params(d: Dimensions) -> int:
    """What a mixture-of-experts block has besides its experts."""
    router = d.n_embd * d.n_expert
    shared = d.n_embd * d.n_ff_shared * _n_matrices(d)
    return router + shared + 2 * d.n_embd * d.n_latent


def _mamba_width(d: Dimensions) -> int:
    """Elements that a Mamba-2 block projects one token to."""
    return 2 * d.ssm_d_inner + 2 * d.ssm_n_group * d.ssm_d_state + d.ssm_n_head


def _block_params(d: Dimensions, kind: LayerKind, il: int) -> int:
    n = 0
    if LayerKind.ATTENTION in kind:
        n += _attention_params(d, _at(d.n_head_kv, il), _length(d, il))
    if LayerKind.MLP in kind:
        n += d.n_embd * _at(d.n_ff, il) * _n_matrices(d)
    if LayerKind.MOE in kind:
        n += _moe_params(d) + _expert_params(d)
    if LayerKind.RECURRENT in kind:
        n += d.n_embd * (
            _mamba_width(d) + d.ssm_d_inner + (d.ssm_n_head if d.architecture in DELTA_NETS else 0)
        )
    return n + 3 * d.n_embd * d.n_embd_per_layer


def _at(value: int | Sequence[int], il: int) -> int:
    return value if isinstance(value, int) else value[il]


def _activations(d: Dimensions) -> int:
    n_ff = d.n_ff if isinstance(d.n_ff, int) else max(d.n_ff)
    n_embd_q = d.n_head * (d.head_dim_swa or _head_length(d))
    most = mlp_activations(d.architecture, n_embd=d.n_embd, n_ff=n_ff, n_embd_q=n_embd_q)
    if d.n_expert:
        sparse = moe_activations(
            d.architecture,
            n_embd=d.n_embd,
            n_embd_expert=d.n_latent or d.n_embd,
            n_ff_used=d.n_expert_used * d.n_ff_expert,
            n_expert_used=d.n_expert_used,
            n_embd_q=n_embd_q,
        )
        most = max(most, sparse)
    return most + per_layer_activations(d.n_embd_per_layer, _n_layer(d))


def _kept_activations(d: Dimensions) -> int:
    return kept_activations(
        d.architecture,
        n_embd_expert=d.n_latent or d.n_embd,
        n_ff_used=d.n_expert_used * d.n_ff_expert,
        n_expert_used=d.n_expert_used,
    )


def _recurrent_activations(d: Dimensions) -> int:
    if not d.ssm_d_inner:
        return 0
    n_conv = d.ssm_d_inner + 2 * d.ssm_n_group * d.ssm_d_state
    return mamba_activations(
        d.architecture, n_embd=d.n_embd, d_inner=d.ssm_d_inner, n_conv=n_conv, n_head=d.ssm_n_head
    )


def _layer(d: Dimensions, kind: LayerKind, il: int, weights_bytes: int, bytes_per_param: float) -> LayerShape:
    is_own = LayerKind.ATTENTION in kind and il < _n_layer(d) - d.n_layer_shared
    n_row = _length(d, il) * _at(d.n_head_kv, il) if is_own else 0
    state_bytes = 0
    if LayerKind.RECURRENT in kind:
        state_bytes = mamba_state_bytes(
            d_conv=d.ssm_d_conv, d_inner=d.ssm_d_inner, d_state=d.ssm_d_state, n_group=d.ssm_n_group
        )
    return LayerShape(
        kind=kind if n_row else kind & ~LayerKind.ATTENTION,
        weights_bytes=weights_bytes,
        n_embd_k_gqa=n_row,
        n_embd_v_gqa=n_row,
        state_bytes=state_bytes,
        expert_bytes=round(_expert_params(d) * bytes_per_param) if LayerKind.MOE in kind else 0,
        n_swa=0 if is_full(d, il) or not n_row else d.n_swa,
    )
