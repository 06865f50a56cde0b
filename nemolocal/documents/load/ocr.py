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
    return "there is no text on it, and OCR is off" if not limits.ocr else "there is no text on it"


def read(page: Any, languages: str) -> tuple[str, str]:
    """The text of a PDFium page, or "" and why there is none."""
    scale = min(DOTS_PER_INCH / 72, 8000 / max(page.get_width(), page.get_height(), 1))
    picture = io.BytesIO()
    page.render(scale=scale, grayscale=True).to_pil().save(picture, "PNG")
    command = [PROGRAM, "stdin", "stdout", *(["-l", languages] if languages else [])]
    try:
        done = subprocess.run(
            command, input=picture.getvalue(), capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"tesseract was not done with it after {LIMIT_S:.0f} s"
    except OSError as error:
        return "", f"tesseract did not start: {error.strerror}"
    if done.returncode:
        said = clean(done.stderr.decode("utf-8", "replace")).split()
        return "", f"tesseract failed: {' '.join(said)[:200]}"
    text = clean(done.stdout.decode("utf-8", "replace")).strip()
    return text, "" if text else "there is no text on it, and tesseract finds none"
