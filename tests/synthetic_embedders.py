"""Small GGUF files of models that embed or rank, with random weights: an encoder without a cache, one whose
graph uses none, a causal model that pools its last token, and rerankers with and without a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nemolocal.models.shape import Dimensions
from tests import synthetic

N_EMBD = 64
N_CTX = 256
"""The longest input of all of these, special tokens included."""

RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge.<|im_end|>\n"
    "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
)

Kind = str
"""One of KINDS."""

_ARCHITECTURES = {
    "bert": "bert",
    "bert-rank": "bert",
    "llama-embed": "llama-embed",
    "qwen3-embed": "qwen3",
    "qwen3-rank": "qwen3",
}
KINDS = tuple(_ARCHITECTURES)

_KEYS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"bert.pooling_type": 2},
    "bert-rank": {},  # as converted: only its head says what it is
    "llama-embed": {"llama-embed.pooling_type": 1, "llama-embed.attention.causal": False},
    "qwen3-embed": {"qwen3.pooling_type": 3},
    "qwen3-rank": {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]},
}


def write(path: Path, kind: Kind, *, n_ctx: int = N_CTX, weights: str = "random", **sizes: Any) -> Path:
    """Write one of KINDS. Inputs get the tokens 1 and 2 around them. `sizes` are Dimensions to change; with
    `weights` "none" the file is a header and a hole."""
    d = replace(
        Dimensions(
            architecture=_ARCHITECTURES[kind],
            layers=3,
            n_ctx_train=n_ctx,
            n_embd=N_EMBD,
            n_vocab=384,
            n_head=4,
            n_head_kv=4 if kind.startswith("bert") else 2,
            n_ff=128,
            head_dim=0 if kind != "qwen3-rank" else 32,
        ),
        **sizes,
    )
    writer = gguf.GGUFWriter(path, d.architecture)
    synthetic.add_dimensions(writer, d)
    synthetic.add_vocab(writer, d.n_vocab)
    if d.architecture == "bert":
        writer.add_causal_attention(False)
        writer.add_layer_norm_eps(1e-5)
        writer.add_token_type_count(2)
    keys = dict(_KEYS[kind])
    if kind == "qwen3-rank":
        keys["tokenizer.chat_template.rerank"] = RERANK_TEMPLATE
    else:
        keys |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
        writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
    for key, value in keys.items():
        synthetic.add_key(writer, key, value)
    rng = np.random.default_rng(KINDS.index(kind))
    for name, dims in _tensors(d, kind):
        if weights == "none":
            n_bytes = 4 * int(np.prod(dims, dtype=np.int64))
            writer.add_tensor_info(name, dims[::-1], np.dtype(np.float32), n_bytes)
        else:
            writer.add_tensor(name, synthetic.random_values(rng, name, dims))
    return synthetic.save(writer, path, weights=weights)


def _tensors(d: Dimensions, kind: Kind) -> Iterator[tuple[str, tuple[int, ...]]]:
    if d.architecture == "bert":
        yield from _bert(d)
    else:
        yield from synthetic.tensors(d)
    if kind == "bert-rank":
        yield "cls.weight", (d.n_embd, d.n_embd)
        yield "cls.bias", (d.n_embd,)
        yield "cls.output.weight", (d.n_embd, 1)
        yield "cls.output.bias", (1,)
    if kind == "qwen3-rank":
        yield "cls.output.weight", (d.n_embd, 2)


def _bert(d: Dimensions) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert isinstance(d.layers, int)
    assert isinstance(d.n_ff, int)
    n = d.n_embd
    yield "token_embd.weight", (n, d.n_vocab)
    yield "token_types.weight", (n, 2)
    yield "position_embd.weight", (n, d.n_ctx_train)
    yield "token_embd_norm.weight", (n,)
    yield "token_embd_norm.bias", (n,)
    for il in range(d.layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{il}.{part}.weight", (n, n)
            yield f"blk.{il}.{part}.bias", (n,)
        yield f"blk.{il}.ffn_up.weight", (n, d.n_ff)
        yield f"blk.{il}.ffn_up.bias", (d.n_ff,)
        yield f"blk.{il}.ffn_down.weight", (d.n_ff, n)
        yield f"blk.{il}.ffn_down.bias", (n,)
        for part in ("attn_output_norm", "layer_output_norm"):
            yield f"blk.{il}.{part}.weight", (n,)
            yield f"blk.{il}.{part}.bias", (n,)
