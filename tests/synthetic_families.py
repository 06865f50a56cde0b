"""Keys and tensors of architectures whose blocks are built unlike those of synthetic.py: gated delta nets
beside attention, sliding windows in most blocks, embeddings for each block. The sizes are llama.cpp's own
(llama-cpp-python 0.3.36, vendor/llama.cpp/src/models)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import gguf

from nemolocal.models.shape import Dimensions, LayerKind, is_full, layer_kinds

Tensors = Iterator[tuple[str, tuple[int, ...]]]


class Block(Protocol):
    def __call__(self, d: Dimensions, il: int, kind: LayerKind) -> Tensors: ...


def add_keys(writer: gguf.GGUFWriter, d: Dimensions) -> None:
    """What these architectures need beyond synthetic.add_dimensions."""
    name, n_layer = d.architecture, len(layer_kinds(d))
    if name in ("qwen35", "qwen35moe"):
        writer.add_array(f"{name}.rope.dimension_sections", [11, 11, 10, 0])
    if name in ("qwen35", "qwen35moe", "qwen3next"):
        writer.add_uint32(f"{name}.full_attention_interval", d.n_full)
    if d.n_swa:
        writer.add_sliding_window(d.n_swa)
    if name == "gemma4":
        writer.add_array(
            f"{name}.attention.sliding_window_pattern", [not is_full(d, il) for il in range(n_layer)]
        )
        writer.add_uint32(f"{name}.attention.key_length_swa", d.head_dim_swa)
        writer.add_uint32(f"{name}.attention.value_length_swa", d.head_dim_swa)
        writer.add_uint32(f"{name}.rope.dimension_count_swa", d.head_dim_swa)
        writer.add_uint32(f"{name}.attention.shared_kv_layers", d.n_layer_shared)
        writer.add_uint32(f"{name}.embedding_length_per_layer_input", d.n_embd_per_layer)


def rest(d: Dimensions) -> Tensors:
    """Tensors outside the blocks, besides the embeddings and the output."""
    n_layer = len(layer_kinds(d))
    if d.n_embd_per_layer:
        yield "per_layer_token_embd.weight", (d.n_embd_per_layer * n_layer, d.n_vocab)
        yield "per_layer_model_proj.weight", (d.n_embd, d.n_embd_per_layer * n_layer)
        yield "per_layer_proj_norm.weight", (d.n_embd_per_layer,)
    if d.architecture == "gemma4":
        yield "rope_freqs.weight", ((d.head_dim or d.n_embd // d.n_head) // 2,)


def _kv(d: Dimensions, il: int) -> int:
    return d.n_head_kv if isinstance(d.n_head_kv, int) else d.n_head_kv[il]


def _ff(d: Dimensions, il: int) -> int:
    return d.n_ff if isinstance(d.n_ff, int) else d.n_ff[il]


def _norms(d: Dimensions, *names: str) -> Tensors:
    for name in names:
        yield f"{name}.weight", (d.n_embd,)


def _dense(d: Dimensions, il: int, suffix: str = "") -> Tensors:
    n_ff = d.n_ff_shared if suffix else _ff(d, il)
    yield f"ffn_gate{suffix}.weight", (d.n_embd, n_ff)
    yield f"ffn_up{suffix}.weight", (d.n_embd, n_ff)
    yield f"ffn_down{suffix}.weight", (n_ff, d.n_embd)


def _experts(d: Dimensions) -> Tensors:
    yield "ffn_gate_inp.weight", (d.n_embd, d.n_expert)
    yield "ffn_gate_exps.weight", (d.n_embd, d.n_ff_expert, d.n_expert)
    yield "ffn_up_exps.weight", (d.n_embd, d.n_ff_expert, d.n_expert)
    yield "ffn_down_exps.weight", (d.n_ff_expert, d.n_embd, d.n_expert)


def _qwen35(d: Dimensions, il: int, kind: LayerKind) -> Tensors:
    yield from _norms(d, "attn_norm", "post_attention_norm")
    if LayerKind.RECURRENT in kind:
        key, value = d.ssm_d_state * d.ssm_n_group, d.ssm_d_state * d.ssm_n_head
        yield "attn_qkv.weight", (d.n_embd, 2 * key + value)
        yield "attn_gate.weight", (d.n_embd, value)
        yield "ssm_conv1d.weight", (d.ssm_d_conv, 2 * key + value)
        yield "ssm_dt.bias", (d.ssm_n_head,)
        yield "ssm_a", (d.ssm_n_head,)
        if d.architecture == "qwen3next":
            yield "ssm_ba.weight", (d.n_embd, 2 * d.ssm_n_head)
        else:
            yield "ssm_beta.weight", (d.n_embd, d.ssm_n_head)
            yield "ssm_alpha.weight", (d.n_embd, d.ssm_n_head)
        yield "ssm_norm.weight", (d.ssm_d_state,)
        yield "ssm_out.weight", (value, d.n_embd)
    else:
        length, n_kv = d.head_dim, _kv(d, il) * d.head_dim
        yield "attn_q.weight", (d.n_embd, 2 * length * d.n_head)
        yield "attn_k.weight", (d.n_embd, n_kv)
        yield "attn_v.weight", (d.n_embd, n_kv)
        yield "attn_output.weight", (length * d.n_head, d.n_embd)
        yield "attn_q_norm.weight", (length,)
        yield "attn_k_norm.weight", (length,)
    if LayerKind.MOE in kind:
        yield from _experts(d)
        yield "ffn_gate_inp_shexp.weight", (d.n_embd,)
        yield from _dense(d, il, "_shexp")
    else:
        yield from _dense(d, il)


def _gpt_oss(d: Dimensions, il: int, kind: LayerKind) -> Tensors:
    yield from _norms(d, "attn_norm", "post_attention_norm")
    widths = {"attn_q": d.n_head * d.head_dim, "attn_k": _kv(d, il) * d.head_dim}
    for name, width in {**widths, "attn_v": widths["attn_k"]}.items():
        yield f"{name}.weight", (d.n_embd, width)
        yield f"{name}.bias", (width,)
    yield "attn_output.weight", (d.n_head * d.head_dim, d.n_embd)
    yield "attn_output.bias", (d.n_embd,)
    yield "attn_sinks.weight", (d.n_head,)
    yield from _experts(d)
    yield "ffn_gate_inp.bias", (d.n_expert,)
    yield "ffn_gate_exps.bias", (d.n_ff_expert, d.n_expert)
    yield "ffn_up_exps.bias", (d.n_ff_expert, d.n_expert)
    yield "ffn_down_exps.bias", (d.n_embd, d.n_expert)


def _gemma4(d: Dimensions, il: int, kind: LayerKind) -> Tensors:
    length = d.head_dim if is_full(d, il) else d.head_dim_swa
    n_kv = _kv(d, il) * length
    yield from _norms(d, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    yield "attn_q.weight", (d.n_embd, length * d.n_head)
    yield "attn_k.weight", (d.n_embd, n_kv)
    yield "attn_v.weight", (d.n_embd, n_kv)
    yield "attn_output.weight", (length * d.n_head, d.n_embd)
    yield "attn_q_norm.weight", (length,)
    yield "attn_k_norm.weight", (length,)
    yield "layer_output_scale.weight", (1,)
    yield from _dense(d, il)
    if LayerKind.MOE in kind:
        yield from _experts(d)
        yield "ffn_gate_inp.scale", (d.n_embd,)
        yield from _norms(d, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    if d.n_embd_per_layer:
        yield "inp_gate.weight", (d.n_embd, d.n_embd_per_layer)
        yield "proj.weight", (d.n_embd_per_layer, d.n_embd)
        yield from _norms(d, "post_norm")


BLOCKS: Mapping[str, Block] = {
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen35,
    "gpt-oss": _gpt_oss,
    "gemma4": _gemma4,
}


def draft_head(d: Dimensions) -> Tensors:
    """The block for multi-token prediction at the end of Qwen's files: one of full attention."""
    kind = layer_kinds(d)[d.n_full - 1]
    yield from _qwen35(d, d.n_full - 1, kind)
    yield "nextn.eh_proj.weight", (2 * d.n_embd, d.n_embd)
    yield from _norms(d, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
