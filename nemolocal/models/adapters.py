"""LoRA adapters as the settings name them: a file, and how strongly it acts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from nemolocal.config import expand
from nemolocal.errors import UsageError

SCALE_MOST = 100  # far beyond it the model computes what is no number


@dataclass(frozen=True, slots=True)
class Adapter:
    path: str
    scale: float
    size_bytes: int


def parse(text: str) -> Adapter:
    """PATH or PATH:SCALE. A colon may belong to the path (on Windows it mostly does).

    Raises UsageError for an adapter that is not there or whose scale is none.
    """
    path, scale = text, 1.0
    before, _, after = text.rpartition(":")
    if before and not Path(expand(text)).exists():
        with contextlib.suppress(ValueError):
            scale, path = float(after), before
    file = Path(expand(path))
    if not file.is_file():
        raise UsageError(
            f"There is no LoRA adapter {path}.", hint="--lora wants FILE.gguf or FILE.gguf:SCALE."
        )
    if not abs(scale) <= SCALE_MOST:  # not a number is not within it either
        raise UsageError(
            f"The LoRA adapter {path} has a scale of {scale:g}, "
            f"which is not from -{SCALE_MOST} to {SCALE_MOST}."
        )
    return Adapter(str(file), scale, file.stat().st_size)
