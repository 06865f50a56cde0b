"""What kind of document a file is, by what is in it; its name only tells one kind of text from another."""

from __future__ import annotations

import re
import zipfile

from nemolocal.documents.load.source import Source

N_LOOKED_AT = 4096

# fmt: off
_CODE = (
    ".py", ".js", ".ts", ".tsx", ".jsx", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs",
    ".java", ".kt", ".go", ".rs", ".rb", ".php", ".swift", ".scala", ".sh", ".ps1", ".sql", ".lua",
    ".r", ".jl", ".pl", ".toml", ".yaml", ".yml", ".json", ".xml", ".ini", ".css", ".proto", ".cmake",
)
# fmt: on

TEXT_SUFFIXES = {
    "markdown": (".md", ".markdown"),
    "html": (".html", ".htm", ".xhtml"),
    "csv": (".csv", ".tsv"),
    "mail": (".eml",),
    "code": _CODE,
    "text": (".txt", ".text", ".log", ".rst", ".tex", ".srt", ".vtt"),
}
PACKED_SUFFIXES = {
    "pdf": (".pdf",),
    "docx": (".docx",),
    "pptx": (".pptx",),
    "xlsx": (".xlsx",),
    "epub": (".epub",),
}
SUFFIXES = tuple(
    suffix for group in (PACKED_SUFFIXES, TEXT_SUFFIXES) for one in group.values() for suffix in one
)
"""The endings of files that are taken out of folders."""

_OTHERS = (
    (b"{\\rtf", "it is RTF", "Save it as DOCX."),
    (b"\x89PNG", "it is an image", "Make a PDF of it; tesseract reads those."),
    (b"\xff\xd8\xff", "it is an image", "Make a PDF of it; tesseract reads those."),
    (b"GIF8", "it is an image", "Make a PDF of it; tesseract reads those."),
    (b"II*\x00", "it is an image", "Make a PDF of it; tesseract reads those."),
    (b"MM\x00*", "it is an image", "Make a PDF of it; tesseract reads those."),
    (b"\x1f\x8b", "it is packed (gzip)", "Unpack it."),
    (b"7z\xbc\xaf", "it is packed (7z)", "Unpack it."),
    (b"Rar!", "it is packed (RAR)", "Unpack it."),
    (b"GGUF", "it is a model file", ""),
    (b"SQLite format 3", "it is a database", ""),
    (b"MZ", "it is a program", ""),
    (b"\x7fELF", "it is a program", ""),
)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_INSIDE = (
    ("word/document.xml", "docx"),
    ("ppt/presentation.xml", "pptx"),
    ("xl/workbook.xml", "xlsx"),
    ("META-INF/container.xml", "epub"),
)
_HTML = re.compile(
    rb"^\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!doctype html|<html)", re.IGNORECASE | re.DOTALL
)
_MAIL = re.compile(rb"^(received|return-path|message-id|from|mime-version|delivered-to): ", re.IGNORECASE)


def kind_of(source: Source) -> str:
    """A key of PACKED_SUFFIXES or of TEXT_SUFFIXES. Raises DocumentError for what is none of them, and for
    what is protected by a password that no reader here takes."""
    with source.path.open("rb") as stream:
        head = stream.read(N_LOOKED_AT)
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _inside(source)
    if head.startswith(_OLE):
        return _refuse_ole(source)
    for begin, what, hint in _OTHERS:
        if head.startswith(begin):
            raise source.unsupported(what, hint)
    suffix = source.path.suffix.lower() if source.path.suffix else ""
    named = next((kind for kind, all_of in TEXT_SUFFIXES.items() if suffix in all_of), "")
    if _HTML.match(head):
        return "html"
    if named in ("", "text") and _MAIL.match(head):
        return "mail"
    return named or "text"


def _inside(source: Source) -> str:
    try:
        with zipfile.ZipFile(source.path) as packed:
            names = set(packed.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise source.damaged(error) from None
    for name, kind in _INSIDE:
        if name in names:
            return kind
    raise source.unsupported("it is a ZIP archive and no document", "Unpack it.")


def _refuse_ole(source: Source) -> str:
    data = source.data()[: 8 << 20]
    if "EncryptedPackage".encode("utf-16-le") in data:
        raise source.unsupported("it is protected by a password", "Save it without one.")
    raise source.unsupported("it is an old Office file", "Save it as DOCX, XLSX or PPTX.")
