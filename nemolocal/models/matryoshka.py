"""Which embedding models were trained so that the beginning of a vector is a vector too (Matryoshka
representation learning). No file says so; their makers do."""

from __future__ import annotations

import re

ARCHITECTURES = frozenset({"gemma-embedding", "jina-bert-v3"})
"""Architectures of which every model is one."""

_NAMES = re.compile(
    r"""
    qwen3.?embedding | nomic.?embed.?text.?v1[._]5 | nomic.?embed.?text.?v2
    | llama.?nemotron.?embed.?1b.?v2 | nv.?embedqa.?1b.?v2
    | mxbai.?embed.?large | arctic.?embed.*(v2|v1[._]5) | jina.?embeddings?.?v[34] | embeddinggemma
    """,
    re.IGNORECASE | re.VERBOSE,
)


def can_shorten(architecture: str, *names: str) -> bool:
    """Whether the vectors of a model may be cut; `names` are what it is called in its file and on disk."""
    return architecture in ARCHITECTURES or any(_NAMES.search(name) for name in names)
