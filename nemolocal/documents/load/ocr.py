"""Pages that are pictures, read by the program tesseract where it is installed."""

from __future__ import annotations

import io
import shutil
import subprocess
from typing import Any

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.text import clean

PROGRAM = "tesseract"
DOTS_PER_INCH = 200
LIMIT_S = 120.0


def is_there() -> bool:
    return shutil.which(PROGRAM) is not None


def why_not(limits: Limits) -> str:
    """Why a page without text was not read, and what helps."""
    if not is_there():
        return "there is no text on it; with the program tesseract installed pictures are read, too"
    if not limits.ocr:
        return "there is no text on it, and OCR is off"
    return "there is no text on it, and tesseract finds none"


def read(page: Any, languages: str) -> str:
    """The text of a PDFium page; "" where there is none or the program fails."""
    scale = min(DOTS_PER_INCH / 72, 8000 / max(page.get_width(), page.get_height(), 1))
    picture = io.BytesIO()
    page.render(scale=scale, grayscale=True).to_pil().save(picture, "PNG")
    command = [PROGRAM, "stdin", "stdout", *(["-l", languages] if languages else [])]
    try:
        done = subprocess.run(
            command, input=picture.getvalue(), capture_output=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return clean(done.stdout.decode("utf-8", "replace")).strip() if done.returncode == 0 else ""
