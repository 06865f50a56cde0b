"""How much of a document is read at most, so that no file takes the machine with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, the time in seconds. `max_unpacked_bytes` and `max_ratio` are for what lies packed in
    a file. `ocr` lets pages without text be read by the program tesseract where it is installed, in
    `ocr_languages` ("deu+eng"; "" is its own default)."""

    max_file_bytes: int = 512 << 20
    max_pages: int = 5_000
    max_chars: int = 50_000_000
    max_unpacked_bytes: int = 512 << 20
    max_ratio: int = 200
    seconds: float = 600.0
    ocr: bool = True
    ocr_languages: str = ""
