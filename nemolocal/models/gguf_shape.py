"""From the keys and tensors of a GGUF header to the shape that the memory plan works on.

The rules are those by which llama.cpp (llama-cpp-python 0.3.36, vendor/llama.cpp/src) makes its own
tensors and caches; each function names the place. What would make it abort there (a list of the wrong
length, too many layers) is refused here with a line. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemolocal.errors import ModelFileError
from nemolocal.models import architectures
from nemolocal.models.gguf_header import Header, SkippedArray, TensorInfo, Value, corrupt
from nemolocal.models.shape import (
    N_BYTES_F32,
    LayerKind,
    LayerShape,
    ModelShape,
    Pooling,
    kept_activations,
    mamba_activations,
    mamba_state_bytes,
    mlp_activations,
    moe_activations,
    per_layer_activations,
)

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS

_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.(\d+)\.(.+)")
_INPUT = ("token_embd.weight", "position_embd.", "token_types.", "per_layer_token_embd.")
_RECURRENT_PARTS = ("ssm_", "shortconv.", "time_mix_")
_ATTENTION_PARTS = ("attn_k", "attn_v", "attn_qkv")
_RANK_HEADS = ("cls.weight", "cls.output.weight")
_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}  # enum llama_pooling_type


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one header, read with the architecture's prefix and with types checked."""

    architecture: str
    values: Mapping[str, Value]

    def count(self, name: str, default: int | None = 0) -> int:
        """A number that is not negative. Raises ModelFileError when it is not one, or when it is missing
        and there is no default."""
        value = self.values.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise corrupt(f"it lacks {self.architecture}.{name}")
        return self._checked(name, value)

    def per_layer(self, name: str, n_layer: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """One number for all layers, or a list with one for each (llama-model-loader.cpp, get_key_or_arr)."""
        value = self.values.get(f"{self.architecture}.{name}")
        if value is None:
            return default
        if isinstance(value, SkippedArray):
            raise corrupt(f"{self.architecture}.{name} has {value.n} numbers for {n_layer} layers")
        if isinstance(value, tuple):
            if len(value) != n_layer:
                raise corrupt(f"{self.architecture}.{name} has {len(value)} numbers for {n_layer} layers")
            return tuple(self._checked(name, item) for item in value)
        return (self._checked(name, value),) * n_layer

    def _checked(self, name: str, value: object) -> int:
        if not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise corrupt(f"{self.architecture}.{name} is no count")
        return int(value)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention of all blocks: heads, KV heads, and the length of one head's key and value."""

    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    k_length: int
    v_length: int


def derive(header: Header, tensors: Iterable[TensorInfo]) -> ModelShape:
    """The shape of a model whose first part has `header` and whose parts together hold `tensors`.

    Raises ModelFileError (corrupt, unsupported) when llama.cpp could not load it.
    """
    all_tensors = tuple(tensors)
    architecture = header.keys["general.architecture"]
    keys = Keys(str(architecture), header.keys)
    n_layer_all = keys.count("block_count", None)
    if not 0 < n_layer_all <= MAX_LAYERS:
        raise corrupt(f"it claims {n_layer_all} layers")
    n_extra = min(keys.count("nextn_predict_layers"), n_layer_all)
    n_expert = keys.count("expert_count")
    n_expert_used = keys.per_layer("expert_used_count", n_layer_all, (0,) * n_layer_all)
    if n_expert > MAX_EXPERTS or max(n_expert_used) > n_expert:
        raise corrupt(f"it claims {max(n_expert_used)} of {n_expert} experts")
    blocks = _group(all_tensors, n_layer_all)
    if n_extra and not blocks[0]:
        raise ModelFileError(
            "This file holds only a draft head for another model.",
            kind="unsupported",
            hint="Give the model's own .gguf file.",
        )
    n_embd = keys.count("embedding_length", None)
    n_ctx_train = keys.count("context_length", None)
    if not n_embd or not n_ctx_train:
        raise corrupt("it claims a width or a context of 0")
    heads = _read_heads(keys, n_layer_all, n_embd)
    n_ff = keys.per_layer("feed_forward_length", n_layer_all, (0,) * n_layer_all)
    layers = tuple(_layer(keys, heads, il, blocks[il], n_ff[il]) for il in range(n_layer_all - n_extra))
    rest = [t for t in all_tensors if not _BLOCK.match(t.name)]
    input_bytes = sum(t.n_bytes for t in rest if t.name.startswith(_INPUT))
    is_tied = _is_tied(keys, rest)
    embedding_bytes = sum(t.n_bytes for t in rest if t.name == "token_embd.weight")
    pooling = _pooling(keys, rest)
    return ModelShape(
        architecture=keys.architecture,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_vocab=_n_vocab(header, rest),
        layers=layers,
        input_bytes=input_bytes,
        output_bytes=sum(t.n_bytes for t in rest) - input_bytes + (embedding_bytes if is_tied else 0),
        is_tied=is_tied,
        n_extra_layers=n_extra,
        extra_bytes=sum(t.n_bytes for block in blocks[n_layer_all - n_extra :] for t in block),
        n_head_max=max(heads.n_head),
        n_activations_max=_activations(keys, heads, n_ff, n_expert_used),
        n_activations_kept=_kept_activations(keys, n_ff, n_expert_used),
        n_activations_recurrent=_recurrent_activations(keys),
        head_length=heads.k_length if any(layer.n_embd_k_gqa for layer in layers) else 0,
        n_params=sum(t.n_elements for t in all_tensors),
        n_expert=n_expert,
        n_expert_used=max(n_expert_used),
        pooling=pooling,
        reads_whole=_reads_whole(keys, pooling),
    )


def _pooling(keys: Keys, rest: list[TensorInfo]) -> Pooling:
    """What the file says; a classifier's head ranks, and an encoder of which nothing is said takes the mean,
    as sentence-transformers does."""
    said = keys.values.get(f"{keys.architecture}.pooling_type")
    if isinstance(said, int) and said in _POOLINGS:
        return _POOLINGS[said]
    if any(tensor.name in _RANK_HEADS for tensor in rest):
        return "rank"
    return "mean" if keys.architecture in architectures.ENCODERS else ""


def _reads_whole(keys: Keys, pooling: Pooling) -> bool:
    """llama-context.cpp, encode and decode; llama-graph.cpp, build_pooling."""
    if pooling in ("", "mean", "cls"):
        return bool(pooling)
    is_causal = keys.values.get(f"{keys.architecture}.attention.causal", True)
    pools_for_rank = keys.values.get(f"{keys.architecture}.classifier.pooling_type")
    return keys.architecture in architectures.ENCODERS or not is_causal or pools_for_rank == 1


def _group(tensors: Iterable[TensorInfo], n_layer: int) -> list[list[TensorInfo]]:
    """The tensors of each block. An encoder's and a decoder's block of one number lie together."""
    blocks: list[list[TensorInfo]] = [[] for _ in range(n_layer)]
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        if found:
            il = int(found[1])
            if il >= n_layer:
                raise corrupt(f"the tensor '{tensor.name}' belongs to a layer beyond the {n_layer}")
            blocks[il].append(tensor)
    return blocks


def _read_heads(keys: Keys, n_layer: int, n_embd: int) -> _Heads:
    """llama-model.cpp, load_hparams: KV heads default to heads, lengths to n_embd / n_head of layer 0."""
    n_head = keys.per_layer("attention.head_count", n_layer, (0,) * n_layer)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, n_head)
    length = n_embd // n_head[0] if n_head[0] else 0
    if not length:
        return _Heads(n_head, n_head_kv, 0, 0)
    return _Heads(
        n_head,
        n_head_kv,
        keys.count("attention.key_length", length),
        keys.count("attention.value_length", length),
    )


def _layer(keys: Keys, heads: _Heads, il: int, block: list[TensorInfo], n_ff: int) -> LayerShape:
    names = Counter[str]()
    for tensor in block:
        part = tensor.name.split(".", 2)[-1]
        names[part] += tensor.n_bytes
    is_recurrent = _has(names, _RECURRENT_PARTS)
    n_k, n_v = _kv_rows(keys, heads, il, names, is_recurrent=is_recurrent)
    kind = LayerKind.NONE
    if n_k:
        kind |= LayerKind.ATTENTION
    if is_recurrent:
        kind |= LayerKind.RECURRENT
    expert_bytes = sum(n_bytes for name, n_bytes in names.items() if "_exps" in name or "_chexps" in name)
    if expert_bytes:
        kind |= LayerKind.MOE
    elif n_ff and _has(names, ("ffn_up", "ffn_down")):
        kind |= LayerKind.MLP
    return LayerShape(
        kind=kind,
        weights_bytes=sum(names.values()),
        n_embd_k_gqa=n_k,
        n_embd_v_gqa=n_v,
        state_bytes=_state_bytes(keys, heads) if is_recurrent else 0,
        expert_bytes=expert_bytes,
        n_swa=_window(keys, il, n_layer=len(heads.n_head)) if n_k else 0,
    )


def _has(names: Iterable[str], parts: tuple[str, ...]) -> bool:
    return any(name.startswith(parts) for name in names)


def _kv_rows(
    keys: Keys, heads: _Heads, il: int, names: Counter[str], *, is_recurrent: bool
) -> tuple[int, int]:
    """Elements of one token's key and value row in this block's own cache.

    llama-hparams.cpp, n_embd_k_gqa; llama-model.cpp, create_memory: hybrids keep keys and values only in
    their attention blocks, all others in every block. Multi-head latent attention keeps no values apart
    (llama-kv-cache.cpp, has_v). The last blocks of Gemma 3n and 4 use the cells of earlier ones.
    """
    architecture = keys.architecture
    if architecture in architectures.WITHOUT_KV or architecture in architectures.RECURRENT:
        return 0, 0
    if architecture in architectures.HYBRID and (
        not _has(names, _ATTENTION_PARTS) or (is_recurrent and architecture != "falcon-h1")
    ):
        return 0, 0
    n_layer = len(heads.n_head)
    if architecture == "gemma3n" and il >= 20:
        return 0, 0
    if architecture == "gemma4" and il >= n_layer - keys.count("attention.shared_kv_layers"):
        return 0, 0
    k_length, v_length = heads.k_length, heads.v_length
    if _window(keys, il, n_layer=n_layer):
        k_length = keys.count("attention.key_length_swa", k_length)
        v_length = keys.count("attention.value_length_swa", v_length)
    if keys.count("attention.key_length_mla"):
        v_length = 0
    n = heads.n_head_kv[il]
    return n * k_length, n * v_length


def _window(keys: Keys, il: int, *, n_layer: int) -> int:
    """The sliding window of a block in tokens, 0 for none. Where it is not known it counts as none, which
    plans too much memory rather than too little (llama-model.cpp, load_swa_pattern)."""
    n_swa = keys.count("attention.sliding_window")
    pattern = keys.values.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if not n_swa or keys.architecture == "phi3":
        return 0
    if isinstance(pattern, tuple):
        return n_swa if len(pattern) == n_layer and pattern[il] else 0
    default = architectures.SWA_PATTERN.get(keys.architecture)
    if default is None:
        return 0
    n, is_full_first = default
    n = pattern if isinstance(pattern, int) and pattern > 0 else n
    is_windowed = il % n != 0 if is_full_first else il % n < n - 1
    return n_swa if is_windowed else 0


def _state_bytes(keys: Keys, heads: _Heads) -> int:
    """State of one sequence in one recurrent block, f32 (llama-hparams.cpp, n_embd_r and n_embd_s)."""
    n_embd = keys.count("embedding_length")
    d_conv = keys.count("ssm.conv_kernel")
    if head_size := keys.count("wkv.head_size"):
        return N_BYTES_F32 * n_embd * (keys.count("token_shift_count", 2) + head_size)
    if n_cache := keys.count("shortconv.l_cache"):
        return N_BYTES_F32 * n_embd * (n_cache - 1)
    if head_dim := keys.count("kda.head_dim"):
        n_head = heads.n_head[0]
        conv = 3 * (d_conv - 1 if d_conv else 3) * n_head * head_dim
        return N_BYTES_F32 * (conv + head_dim * head_dim * n_head)
    d_inner, d_state = keys.count("ssm.inner_size"), keys.count("ssm.state_size")
    return mamba_state_bytes(
        d_conv=d_conv, d_inner=d_inner, d_state=d_state, n_group=keys.count("ssm.group_count")
    )


def _activations(keys: Keys, heads: _Heads, n_ff: tuple[int, ...], n_expert_used: tuple[int, ...]) -> int:
    n_layer = len(n_ff)
    n_embd = keys.count("embedding_length")
    n_embd_q = max(heads.n_head) * keys.count("attention.key_length_swa", heads.k_length)
    widths = [mlp_activations(keys.architecture, n_embd=n_embd, n_ff=max(n_ff), n_embd_q=n_embd_q)]
    n_ff_expert = keys.per_layer("expert_feed_forward_length", n_layer, n_ff)
    widths += [
        moe_activations(
            keys.architecture,
            n_embd=n_embd,
            n_embd_expert=keys.count("moe_latent_size") or n_embd,
            n_ff_used=n * ff,
            n_expert_used=n,
            n_embd_q=n_embd_q,
        )
        for n, ff in zip(n_expert_used, n_ff_expert, strict=True)
        if n
    ]
    return max(widths) + per_layer_activations(keys.count("embedding_length_per_layer_input"), n_layer)


def _kept_activations(keys: Keys, n_ff: tuple[int, ...], n_expert_used: tuple[int, ...]) -> int:
    n_ff_expert = keys.per_layer("expert_feed_forward_length", len(n_ff), n_ff)
    n_embd = keys.count("moe_latent_size") or keys.count("embedding_length")
    return max(
        kept_activations(keys.architecture, n_embd_expert=n_embd, n_ff_used=n * ff, n_expert_used=n)
        for n, ff in zip(n_expert_used, n_ff_expert, strict=True)
    )


def _recurrent_activations(keys: Keys) -> int:
    d_inner = keys.count("ssm.inner_size")
    if not d_inner:
        return 0
    return mamba_activations(
        keys.architecture,
        n_embd=keys.count("embedding_length"),
        d_inner=d_inner,
        n_conv=d_inner + 2 * keys.count("ssm.group_count") * keys.count("ssm.state_size"),
        n_head=keys.count("ssm.time_step_rank"),
    )


def _is_tied(keys: Keys, rest: list[TensorInfo]) -> bool:
    """Without an output matrix llama.cpp makes one from the embeddings (TENSOR_DUPLICATED); the encoders
    that keep no cache have none."""
    if keys.architecture in architectures.ENCODERS & architectures.WITHOUT_KV - {"gemma-embedding"}:
        return False
    return not any(t.name == "output.weight" for t in rest)


def _n_vocab(header: Header, rest: list[TensorInfo]) -> int:
    for tensor in rest:
        if tensor.name == "token_embd.weight" and len(tensor.dims) == 2:
            return tensor.dims[1]
    tokens = header.keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, SkippedArray):
        return tokens.n
    return len(tokens) if isinstance(tokens, tuple) else 0
