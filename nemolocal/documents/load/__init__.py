"""Reading a document, whatever it is: what it is is told by its content, and each format has a module here
with `read(source, limits, on_page) -> Document`, which is imported when it is needed."""

from __future__ import annotations

import importlib
import stat
from pathlib import Path

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import sniff
from nemolocal.documents.load.source import OnPage, Source, display_name, hash_of
from nemolocal.documents.parts import Document
from nemolocal.errors import DocumentError

MODULES = {
    "pdf": "pdf",
    "docx": "docx",
    "pptx": "pptx",
    "xlsx": "sheets",
    "csv": "table",
    "epub": "epub",
    "html": "html",
    "mail": "mail",
    "markdown": "markdown",
    "code": "code",
    "text": "text",
}


def load(
    path: str | Path,
    *,
    name: str = "",
    limits: Limits | None = None,
    password: str = "",
    on_page: OnPage = lambda n_done, n_all: None,
) -> Document:
    """Read one file. Raises DocumentError where there is nothing to be had of it."""
    path, limits = Path(path), limits or Limits()
    shown = display_name(name or path.name)
    try:
        _check_file(path, shown, limits)
        source = Source(path, shown, hash_of(path), password)
        kind = sniff.kind_of(source)
        reader = importlib.import_module(f"{__name__}.{MODULES[kind]}")
        document: Document = reader.read(source, limits, on_page)
    except FileNotFoundError:
        raise DocumentError(f"There is no file {display_name(str(path))}.", kind="missing") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise DocumentError(
            f"{shown} cannot be read: {why}.", kind="missing", hint="Check the file's rights."
        ) from None
    except MemoryError:
        raise Source(path, shown).too_large("it needs more memory than a document may have") from None
    except RecursionError:
        raise Source(path, shown).damaged("it is nested too deep") from None
    if len(document.text) > limits.max_chars:
        raise source.too_large(f"{len(document.text):,} characters are more than {limits.max_chars:,}")
    if not document.blocks:
        raise source.empty()
    return document


def _check_file(path: Path, shown: str, limits: Limits) -> None:
    try:
        found = path.stat()
    except ValueError as error:  # NUL in the name
        raise DocumentError(f"{shown} cannot be looked at: {error}.", kind="missing") from None
    if stat.S_ISDIR(found.st_mode):
        raise DocumentError(f"{shown} is a folder.", kind="unsupported")
    if not stat.S_ISREG(found.st_mode):
        raise DocumentError(f"{shown} is no ordinary file.", kind="unsupported")
    if found.st_size == 0:
        raise DocumentError(f"{shown} is empty: it has no bytes.", kind="empty")
    if found.st_size > limits.max_file_bytes:
        most = limits.max_file_bytes >> 20
        raise Source(path, shown).too_large(f"{found.st_size >> 20} MiB are more than {most} MiB")
