"""Small GGUF files, written on the spot: real architectures with few and narrow layers.

`write_tiny` gives a model of a few hundred kilobytes that llama.cpp loads and runs (its text is noise, but
the same noise each time). `write` takes any dimensions; with `weights="none"` only the header is written
and the file is stretched to its full length, which costs no disk space where files may have holes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from nemolocal.models.shape import Dimensions, LayerKind, layer_kinds
from tests import synthetic_families as families

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_HYBRID = {"ssm_d_inner": 64, "ssm_d_state": 16, "ssm_n_group": 2, "ssm_n_head": 4}
_MOE = {"n_expert": 4, "n_expert_used": 2, "n_ff_expert": 64}


def _tiny(architecture: str, **changes: Any) -> Dimensions:
    base = Dimensions(
        architecture=architecture,
        layers=4,
        n_ctx_train=1024,
        n_embd=64,
        n_vocab=384,
        n_head=4,
        n_head_kv=2,
        n_ff=128,
    )
    return replace(base, **changes)


TINY: Mapping[str, Dimensions] = {
    "llama": _tiny("llama"),
    "llama-tied": _tiny("llama", is_tied=True),
    "llama-moe": _tiny("llama", n_ff=64, **_MOE),
    "qwen2": _tiny("qwen2"),
    "qwen3": _tiny("qwen3", head_dim=32, is_tied=True),
    "qwen3moe": _tiny("qwen3moe", **_MOE),
    "gemma3": _tiny("gemma3", layers=8, is_tied=True),
    "deci": _tiny("deci", n_head_kv=(2, 0, 2, 0), n_ff=(128, 256, 0, 32)),
    "nemotron": _tiny("nemotron"),
    "nemotron_h": _tiny("nemotron_h", layers="M-M*-", **_HYBRID),
    "nemotron_h_moe": _tiny("nemotron_h_moe", layers="MEM*E", n_ff=0, n_ff_shared=96, **_MOE, **_HYBRID),
    "nemotron_h_moe-mtp": _tiny(
        "nemotron_h_moe", layers="MEM*E", n_ff=0, n_ff_shared=96, n_extra_layers=1, **_MOE, **_HYBRID
    ),
}
"""A tiny model for each way in which models are built."""

N_SWA = 256
"""The sliding window of the tiny and wide Gemma models, in tokens."""


def write_tiny(path: Path, model: str = "llama", **options: Any) -> Path:
    """Write one of the TINY models with random weights; `options` are those of `write`."""
    return write(path, TINY[model], **options)


def write(
    path: Path,
    dimensions: Dimensions,
    *,
    weights: Literal["random", "none"] = "random",
    type_name: str = "F32",
    has_vocab: bool = True,
    chat_template: str | None = CHATML,
    keys: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    n_tensors_per_part: int = 0,
    is_attentive: bool = False,
    seed: int = 0,
) -> Path:
    """Write a GGUF of these dimensions and return the path that the engine is given.

    `type_name` is the type of the matrices. `has_vocab` False leaves out the tokens, which a header with a
    real vocabulary's size is spared. `keys` are added as they are, `overrides` take the place of what was
    there. `n_tensors_per_part` splits the model into files named after `path`. With `is_attentive` random
    weights are such that every token of the text weighs in what comes next, as in a trained model.
    """
    d = dimensions
    writer = gguf.GGUFWriter(
        path, d.architecture, split_max_tensors=n_tensors_per_part, split_max_size=0, dry_run=False
    )
    add_dimensions(writer, d)
    if has_vocab:
        add_vocab(writer, d.n_vocab)
    else:
        writer.add_tokenizer_model("no_vocab")
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (keys or {}).items():
        add_key(writer, key, value)
    for key, value in (overrides or {}).items():
        writer.kv_data[0].pop(key, None)
        add_key(writer, key, value)
    rng = np.random.default_rng(seed)
    for name, dims in tensors(d):
        kind = _tensor_type(name, dims, Type[type_name])
        if weights == "none":
            n_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            n_bytes = int(np.prod(dims, dtype=np.int64)) // n_block * block_bytes
            writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), n_bytes, raw_dtype=kind)
        else:
            values = random_values(rng, name, dims)
            if is_attentive:
                values = _attentive(values, rng, name)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return save(writer, path, weights=weights)


def write_lora(path: Path, dimensions: Dimensions, *, n_rank: int = 4, seed: int = 0) -> Path:
    """Write a LoRA adapter for a model of these dimensions. At a scale of 1 it changes the answers as much as
    other weights would."""
    writer = gguf.GGUFWriter(path, dimensions.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(n_rank))
    rng = np.random.default_rng(seed)
    for name, dims in tensors(dimensions):
        if re.search(r"(attn_[qkv]|attn_output|ffn_(up|down)|ssm_(in|out))\.weight$", name):
            n_in, n_out = dims
            for side, shape in (("a", (n_rank, n_in)), ("b", (n_out, n_rank))):
                values = rng.normal(0.0, shape[1] ** -0.5, shape).astype(np.float32)
                writer.add_tensor(f"{name}.lora_{side}", values)
    return save(writer, path, weights="random")


def _tensor_type(name: str, dims: tuple[int, ...], wanted: Type) -> Type:
    """As llama.cpp's quantizer does it: matrices only, and those whose rows are whole blocks."""
    is_matrix = len(dims) > 1 and name.endswith(".weight") and not re.search(r"ssm_(conv1d|norm)", name)
    fits = dims[0] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if is_matrix and fits else Type.F32


def save(writer: gguf.GGUFWriter, path: Path, *, weights: str) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if weights == "none":
        writer.write_ti_data_to_file()
        n_bytes = [sum(-(-t.nbytes // 32) * 32 for t in part.values()) for part in writer.tensors]
        for file, size in zip(writer.fout, n_bytes, strict=True):
            writer.write_padding(file, file.tell())
            file.flush()
            os.truncate(file.name, file.tell() + size)
    else:
        writer.write_tensors_to_file()
    written = Path(writer.fout[0].name)
    writer.close()
    return written


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def add_dimensions(writer: gguf.GGUFWriter, d: Dimensions) -> None:
    kinds = layer_kinds(d)
    n_extra = d.n_extra_layers
    length = d.head_dim or d.n_embd // d.n_head
    writer.add_name(f"Tiny {d.architecture}")
    writer.add_context_length(d.n_ctx_train)
    writer.add_embedding_length(d.n_embd)
    writer.add_block_count(len(kinds) + n_extra)
    writer.add_vocab_size(d.n_vocab)
    writer.add_rope_dimension_count(length)
    writer.add_key_length(length)
    writer.add_value_length(length)
    if d.architecture.startswith("nemotron"):
        writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    if d.architecture == "gemma3":
        writer.add_sliding_window(N_SWA)
    if d.n_expert:
        writer.add_expert_count(d.n_expert)
        writer.add_expert_used_count(d.n_expert_used)
        writer.add_expert_feed_forward_length(d.n_ff_expert)
    if d.n_ff_shared:
        writer.add_expert_shared_feed_forward_length(d.n_ff_shared)
    if d.n_latent:
        writer.add_moe_latent_size(d.n_latent)
    if n_extra:
        writer.add_nextn_predict_layers(n_extra)
    if d.ssm_d_inner:
        writer.add_ssm_conv_kernel(d.ssm_d_conv)
        writer.add_ssm_inner_size(d.ssm_d_inner)
        writer.add_ssm_state_size(d.ssm_d_state)
        writer.add_ssm_group_count(d.ssm_n_group)
        writer.add_ssm_time_step_rank(d.ssm_n_head)
    _add_per_layer(writer, d, kinds)
    families.add_keys(writer, d)


def _add_per_layer(writer: gguf.GGUFWriter, d: Dimensions, kinds: tuple[LayerKind, ...]) -> None:
    if d.architecture not in ("deci", "nemotron_h", "nemotron_h_moe"):
        writer.add_head_count(d.n_head)
        writer.add_head_count_kv(d.n_head_kv if isinstance(d.n_head_kv, int) else list(d.n_head_kv))
        writer.add_feed_forward_length(int(np.max(d.n_ff)))
        return
    n_kv = [_at(d.n_head_kv, il) if LayerKind.ATTENTION in kind else 0 for il, kind in enumerate(kinds)]
    n_ff = [
        d.n_ff_expert if LayerKind.MOE in kind else _at(d.n_ff, il) if LayerKind.MLP in kind else 0
        for il, kind in enumerate(kinds)
    ]
    n_kv += [max(n_kv)] * d.n_extra_layers
    n_ff += [d.n_ff_expert] * d.n_extra_layers
    if d.architecture == "deci":
        writer.add_head_count([d.n_head if n else 0 for n in n_kv])
    else:
        writer.add_head_count(d.n_head)
    writer.add_head_count_kv(n_kv)
    writer.add_feed_forward_length(n_ff)


def _at(value: int | tuple[int, ...], il: int) -> int:
    return value if isinstance(value, int) else value[il]


def add_vocab(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A byte-level vocabulary with a few merges and the ChatML control tokens."""
    bytes_ = [_byte_character(b) for b in range(256)]
    merges = ["t h", "h e", "i n", "e r", "a n", "o n", "r e", "th e", "in g", "an d"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_, *words]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (256 + len(words))
    n_rest = n_vocab - len(tokens)
    assert n_rest >= 0, "the vocabulary needs at least 269 tokens"
    tokens += [f"\u0120w{i}" for i in range(n_rest)]  # U+0120 stands for a blank
    types += [gguf.TokenType.NORMAL] * n_rest
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _byte_character(byte: int) -> str:
    """The printable stand-in that byte-level BPE writes for a byte: its own character where that prints,
    else one of those from U+0100 on, in order."""
    prints = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    if byte in prints:
        return chr(byte)
    return chr(256 + sum(1 for b in range(byte) if b not in prints))


def random_values(rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> np.ndarray:
    shape = dims[::-1]
    if name.endswith("ssm_a"):
        return -np.abs(rng.normal(1.0, 0.2, shape)).astype(np.float32)
    if "norm.weight" in name or name.endswith("ssm_d"):
        return np.ones(shape, np.float32)
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    scale = 1.0 if name == "token_embd.weight" else dims[0] ** -0.5
    return rng.normal(0.0, scale, shape).astype(np.float32)


def _attentive(values: np.ndarray, rng: np.random.Generator, name: str) -> np.ndarray:
    """Attention that picks some tokens rather than taking the mean of all, recurrent state that lasts for a
    hundred tokens rather than for two, experts that are clearly chosen, and less of a token itself."""
    if name.endswith("ssm_dt.bias"):
        return rng.uniform(-5.0, -1.0, values.shape).astype(np.float32)
    gains = {"token_embd.": 0.3, "attn_q.": 3.0, "attn_q_norm.": 3.0, "ffn_gate_inp.": 10.0}
    gain = next((gain for part, gain in gains.items() if f"{part}weight" in name), 1.0)
    return values * np.float32(gain)


Tensors = Iterator[tuple[str, tuple[int, ...]]]


def tensors(d: Dimensions) -> Tensors:
    """Names and sizes of all tensors, the length of a row first."""
    yield "token_embd.weight", (d.n_embd, d.n_vocab)
    yield "output_norm.weight", (d.n_embd,)
    if d.architecture == "nemotron":
        yield "output_norm.bias", (d.n_embd,)
    if not d.is_tied:
        yield "output.weight", (d.n_embd, d.n_vocab)
    yield from families.rest(d)
    kinds = layer_kinds(d)
    for il, kind in enumerate(kinds):
        for name, dims in _block(d, il, kind):
            yield f"blk.{il}.{name}", dims
    for il in range(len(kinds), len(kinds) + d.n_extra_layers):
        for name, dims in _draft_head(d):
            yield f"blk.{il}.{name}", dims


def _block(d: Dimensions, il: int, kind: LayerKind) -> Tensors:
    if d.architecture in families.BLOCKS:
        yield from families.BLOCKS[d.architecture](d, il, kind)
        return
    is_hybrid = d.architecture.startswith("nemotron_h")
    if is_hybrid or LayerKind.ATTENTION in kind:
        yield from _norm(d, "attn_norm")
    if LayerKind.ATTENTION in kind:
        yield from _attention(d, _at(d.n_head_kv, il))
    if LayerKind.RECURRENT in kind:
        yield from _mamba(d)
    if kind & (LayerKind.MLP | LayerKind.MOE) and not is_hybrid:
        yield from _norm(d, "ffn_norm")
    if LayerKind.MLP in kind:
        if not d.architecture.startswith("nemotron"):
            yield "ffn_gate.weight", (d.n_embd, _at(d.n_ff, il))
        yield "ffn_up.weight", (d.n_embd, _at(d.n_ff, il))
        yield "ffn_down.weight", (_at(d.n_ff, il), d.n_embd)
    if LayerKind.MOE in kind:
        yield from _experts(d)
    if d.architecture == "gemma3":
        yield "post_attention_norm.weight", (d.n_embd,)
        yield "post_ffw_norm.weight", (d.n_embd,)


def _norm(d: Dimensions, name: str) -> Tensors:
    yield f"{name}.weight", (d.n_embd,)
    if d.architecture == "nemotron":
        yield f"{name}.bias", (d.n_embd,)


def _attention(d: Dimensions, n_head_kv: int) -> Tensors:
    length = d.head_dim or d.n_embd // d.n_head
    widths = {"attn_q": d.n_head * length, "attn_k": n_head_kv * length, "attn_v": n_head_kv * length}
    for name, width in widths.items():
        yield f"{name}.weight", (d.n_embd, width)
        if d.architecture == "qwen2":
            yield f"{name}.bias", (width,)
    yield "attn_output.weight", (d.n_head * length, d.n_embd)
    if d.architecture in ("qwen3", "qwen3moe", "gemma3"):
        yield "attn_q_norm.weight", (length,)
        yield "attn_k_norm.weight", (length,)


def _mamba(d: Dimensions) -> Tensors:
    width = d.ssm_d_inner + 2 * d.ssm_n_group * d.ssm_d_state
    yield "ssm_in.weight", (d.n_embd, d.ssm_d_inner + width + d.ssm_n_head)
    yield "ssm_conv1d.weight", (d.ssm_d_conv, width)
    yield "ssm_conv1d.bias", (width,)
    yield "ssm_dt.bias", (d.ssm_n_head,)
    yield "ssm_a", (1, d.ssm_n_head)
    yield "ssm_d", (1, d.ssm_n_head)
    yield "ssm_norm.weight", (d.ssm_d_inner // d.ssm_n_group, d.ssm_n_group)
    yield "ssm_out.weight", (d.ssm_d_inner, d.n_embd)


def _experts(d: Dimensions) -> Tensors:
    is_gated = not d.architecture.startswith("nemotron")
    width = d.n_latent or d.n_embd
    yield "ffn_gate_inp.weight", (d.n_embd, d.n_expert)
    if is_gated:
        yield "ffn_gate_exps.weight", (width, d.n_ff_expert, d.n_expert)
    else:
        yield "exp_probs_b.bias", (d.n_expert,)
    yield "ffn_up_exps.weight", (width, d.n_ff_expert, d.n_expert)
    yield "ffn_down_exps.weight", (d.n_ff_expert, width, d.n_expert)
    if d.n_ff_shared:
        yield "ffn_up_shexp.weight", (d.n_embd, d.n_ff_shared)
        yield "ffn_down_shexp.weight", (d.n_ff_shared, d.n_embd)
    if d.n_latent:
        yield "ffn_latent_down.weight", (d.n_embd, d.n_latent)
        yield "ffn_latent_up.weight", (d.n_latent, d.n_embd)


def _draft_head(d: Dimensions) -> Tensors:
    """A block for multi-token prediction, as the Nemotron 3 files have one at the end."""
    if d.architecture in families.BLOCKS:
        yield from families.draft_head(d)
        return
    for name in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm", "post_attention_norm"):
        yield f"{name}.weight", (d.n_embd,)
    yield "nextn.eh_proj.weight", (2 * d.n_embd, d.n_embd)
    yield from _attention(d, int(np.max(d.n_head_kv)))
    yield from _experts(d)
