"""Text from models and people, made ready and safe to show as Markdown. Pure; must not know gradio.

The page's Markdown renderer lets raw HTML through, loads images from anywhere and draws diagrams that may
hold links. No reading of the text (where does code begin, what is a tag) would stay in step with the
renderer's own, so safety rests on none: an invisible character is put wherever a tag, an image or a diagram
could begin, inside code too. What the renderer is given then holds no such beginning, however it reads it.
The page takes the character out again of all that is copied (assets/page.js) or edited (`unguarded`).

Formulae are a matter of looks only, so there the text is read: outside code, their marks become characters
that occur nowhere else, since the renderer looks for the marks in code as well.
"""

from __future__ import annotations

import re

GUARD = "\u2060"
"""Word joiner: no width, no glyph, no place to break a line."""

# The last two are the renderer's own: it draws ```mermaid as a diagram, and puts formulae back in place
# of this mark.
_BEGINNING = re.compile(r"<(?=[A-Za-z/!?])|!(?=\[)|```(?=mermaid)|%%%(?=LATEX_BLOCK_)")
_GUARDED = re.compile(rf"(<|!(?={GUARD}\[)|```|%%%){GUARD}")

# (opening mark, closing mark, on a line of its own): the i-th pair is shown as the i-th pair of characters
# from the private use area.
_MARKS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))
_FIRST = 0xE000
_STANDINS = {chr(_FIRST + n): mark for n, mark in enumerate(m for pair in _MARKS for m in pair[:2])}
_STANDIN = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + 2 * len(_MARKS) - 1)}]")

LATEX_DELIMITERS: list[dict[str, str | bool]] = [
    {"left": chr(_FIRST + 2 * n), "right": chr(_FIRST + 2 * n + 1), "display": display}
    for n, (_, _, display) in enumerate(_MARKS)
]
"""What the renderer typesets, as `guarded` writes it."""

# What stands within one paragraph; bounded, and a formula holds no second opening mark, so that a model
# which repeats itself without end costs no more than its length.
_SPAN = r"(?:(?!\n[ \t]*\n).){1,2000}?"
_TEX = r"(?:(?!\n[ \t]*\n|\$\$|\\[\[(]).)+?"
# A fenced block up to its closing fence or the end, or a span of code.
_CODE = re.compile(
    r"^[ \t>*+\-\d.)]*(?P<fence>`{3,}|~{3,})[^\n]*(?:\n.*?)??(?:\n[ \t>]*(?P=fence)[`~]*[ \t]*$|\Z)"
    rf"|(?<!`)(?P<ticks>`+)(?!`){_SPAN}(?<!`)(?P=ticks)(?!`)",
    re.DOTALL | re.MULTILINE,
)
# A single $ opens a formula only where a price or a shell variable would not stand.
_FORMULA = re.compile(
    rf"\$\$({_TEX})\$\$|\\\[({_TEX})\\\]|\\\(({_TEX})\\\)"
    r"|(?<![\\$\w])\$(?=[^\s$])((?:[^$\\\n]|\\.){1,500}?)(?<=\S)\$(?![\d$\w])",
    re.DOTALL,
)
_ACTIVE = re.compile(r"<(?=[A-Za-z/!?])|!(?=\[)")


def guarded(text: str) -> str:
    """The text as the renderer may have it: formulae marked, and no tag, image or diagram beginning.
    Looks the same when shown."""
    text = _STANDIN.sub("\ufffd", text)
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_FORMULA.sub(_formula, text[end : code.start()]), code[0]]
        end = code.end()
    parts.append(_FORMULA.sub(_formula, text[end:]))
    return _BEGINNING.sub(rf"\g<0>{GUARD}", "".join(parts))


def unguarded(text: str) -> str:
    """The text that `guarded` was given."""
    return _STANDIN.sub(lambda found: _STANDINS[found[0]], _GUARDED.sub(r"\1", text))


def exported(text: str) -> str:
    """Markdown for a file that any viewer may open: tags and images outside code become plain text."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_ACTIVE.sub(r"\\\g<0>", text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _ACTIVE.sub(r"\\\g<0>", text[end:])])


def _formula(found: re.Match[str]) -> str:
    n = found.lastindex or 1
    # The typesetter does not know the word joiner; to it a blank is nothing.
    formula = _BEGINNING.sub(r"\g<0> ", found[n])
    return f"{chr(_FIRST + 2 * n - 2)}{formula}{chr(_FIRST + 2 * n - 1)}"
