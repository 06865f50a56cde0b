"""Text made safe and ready for the page's Markdown renderer."""

from __future__ import annotations

import re

import pytest

from nemolocal.ui.markup import GUARD, LATEX_DELIMITERS, exported, guarded, unguarded

ACTIVE = [
    '<img src=x onerror="window.__x=1">',
    "<script>window.__x=1</script>",
    "</div><svg/onload=window.__x=1>",
    "<!-- comment --><?php ?>",
    "![leak](http://127.0.0.1:9/leak?q=1)",
    "![leak][ref]\n\n[ref]: http://127.0.0.1:9/",
    "```\n<iframe src=http://127.0.0.1:9/></iframe>\n```",
    "para\n      ```\n<img src=http://127.0.0.1:9/>",
    "`<b>` and ``<i>``",
    "$$<img src=x>$$ \\(<b>\\)",
    "<<script>script>alert(1)<</script>/script>",
    "```mermaid\ngraph TD; A-->B\n```",
]


@pytest.mark.parametrize("text", ACTIVE)
def test_no_tag_image_or_diagram_begins_anywhere(text: str) -> None:
    safe = guarded(text)
    assert not re.search(r"<[A-Za-z/!?]|!\[|```mermaid", safe)


@pytest.mark.parametrize(
    "text",
    [text for text in ACTIVE if "$$" not in text]
    + ["a < b && c > d", "plain", "", "$x$ \\(a\\) \\[b\\] $$c$$", "`$x$`", "5 $ and 6 $"],
)
def test_unguarded_gives_back_what_was_written(text: str) -> None:
    assert unguarded(guarded(text)) == text


def test_harmless_text_is_left_as_it_is() -> None:
    text = "a < b, x <= y, 3<4, wow! [link](https://example.com) **bold** 🎉 &amp; &lt;"
    assert guarded(text) == text


def formulae(text: str) -> list[tuple[str, bool]]:
    """What the renderer would typeset in this text, and whether on a line of its own."""
    found = []
    for delimiter in LATEX_DELIMITERS:
        pattern = f"{delimiter['left']}(.+?){delimiter['right']}"
        found += [(tex, bool(delimiter["display"])) for tex in re.findall(pattern, guarded(text), re.DOTALL)]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$$a^2$$", [("a^2", True)]),
        ("\\[a\n+ b\\]", [("a\n+ b", True)]),
        ("so \\(x\\) is", [("x", False)]),
        ("so $x < y$ is", [("x < y", False)]),
        ("$a<b$", [("a< b", False)]),
        ("it costs $5 or $10, or US$7", []),
        ("`$x$` and ```$y$```", []),
        ("```sh\necho $$ > a; kill $$\n```", []),
        ("1. run\n   ```sh\n   echo $HOME $PATH$\n   ```\n2. then $z$", [("z", False)]),
        ("```\nopen fence $$a$$", []),
        ("a $$ alone\n\nand $$ again", []),
        ("export A=$B and C=$D", []),
    ],
)
def test_formulae_are_found_outside_code_and_apart_from_prices(
    text: str, expected: list[tuple[str, bool]]
) -> None:
    assert formulae(text) == expected


def test_characters_that_stand_for_marks_cannot_be_forged() -> None:
    assert guarded("\ue000x\ue001") == "\ufffdx\ufffd"


def test_endless_repetition_costs_no_more_than_its_length() -> None:
    for piece in ("\\[", "$$ ", "` ``", "$a ", "<a", "- 1. > ", "```"):
        guarded(piece * 20_000)
        exported(piece * 20_000)


def test_an_export_shows_tags_and_images_as_text_outside_code_only() -> None:
    text = "<b>x</b> ![i](http://h/)\n\n```html\n<b>kept</b>\n```\n`<i>` and a < b"
    assert exported(text) == "\\<b>x\\</b> \\![i](http://h/)\n\n```html\n<b>kept</b>\n```\n`<i>` and a < b"


def test_the_guard_has_no_width() -> None:
    assert GUARD == "\u2060"
