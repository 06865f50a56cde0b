"""Marks: one character for one, lost by no operation, and never part of a control token."""

from __future__ import annotations

import pytest

from nemolocal.chat.provenance import ControlTokens, MarkedDict, Marks, private_characters
from nemolocal.errors import InvalidRequestError
from nemolocal.types import Segment

TOKENS = ControlTokens(["<|end|>", "<|end|><|end|>", "</s>", " ", ""])
MARKS = Marks(TOKENS.alphabet)
TEXT = "</s> a <|end|>, b <|end|>\n"


def test_marking_can_be_undone_and_keeps_every_character_in_its_place() -> None:
    marked = MARKS.mark(TEXT)
    assert marked != TEXT
    assert len(marked) == len(TEXT)
    assert MARKS.unmark(marked) == TEXT


def test_control_tokens_are_cut_from_plain_text_longest_first_and_never_from_marked_text() -> None:
    rendered = "<|end|><|end|></s>" + MARKS.mark("</s> <|end|>") + " x<|end|>"
    assert TOKENS.cut(rendered, MARKS) == (
        Segment("<|end|><|end|>", is_control=True),
        Segment("</s>", is_control=True),
        Segment("</s> <|end|> x"),
        Segment("<|end|>", is_control=True),
    )


@pytest.mark.parametrize(("template_text", "content"), [("<|", "end|>"), ("<", "|end|>"), ("</s", ">")])
def test_a_control_token_needs_the_template_for_each_of_its_characters(
    template_text: str, content: str
) -> None:
    glued = template_text + MARKS.mark(content)
    assert [s.is_control for s in TOKENS.cut(glued, MARKS)] == [False]


def test_no_control_tokens_leave_one_segment_and_no_text_leaves_none() -> None:
    none = ControlTokens([])
    assert none.cut("<|end|>", Marks(none.alphabet)) == (Segment("<|end|>"),)
    assert none.cut("", Marks()) == ()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("split", ("</s>",)),
        ("split", ("<|end|>", 1)),
        ("split", ()),
        ("rsplit", ("<|end|>", 1)),
        ("rsplit", (None, 2)),
        ("partition", ("<|end|>",)),
        ("partition", ("nowhere",)),
        ("rpartition", ("<|end|>",)),
        ("strip", ()),
        ("strip", ("</s>\n",)),
        ("lstrip", ("</",)),
        ("rstrip", ("\n>",)),
        ("removeprefix", ("</s>",)),
        ("removesuffix", ("<|end|>\n",)),
        ("replace", ("<|end|>", "")),
        ("replace", ("<|end|>", "-", 1)),
        ("replace", ("", "-")),
    ],
)
def test_marked_text_is_cut_where_plain_text_would_be_and_stays_marked(
    method: str, arguments: tuple[object, ...]
) -> None:
    plain = getattr(TEXT, method)(*arguments)
    marked = getattr(MARKS, method)(MARKS.mark(TEXT), *arguments)
    assert MARKS.unmark_all(marked, lambda n: None) == plain
    assert marked == (MARKS.mark(plain) if isinstance(plain, str) else type(plain)(map(MARKS.mark, plain)))


def test_removing_text_between_two_halves_makes_no_control_token() -> None:
    joined = MARKS.replace(MARKS.mark("<|e/thinknd|>"), "/think", "")
    assert MARKS.unmark(joined) == "<|end|>"
    assert TOKENS.cut(joined, MARKS) == (Segment("<|end|>"),)


def test_a_marked_mapping_is_read_by_plain_and_by_marked_keys() -> None:
    mapping = MARKS.mark_all({"end": ["</s>", 1, None]})
    assert isinstance(mapping, MarkedDict)
    (key,) = mapping
    assert key == MARKS.mark("end") != "end"
    assert mapping["end"] == mapping[key] == mapping.get("end") == [MARKS.mark("</s>"), 1, None]
    assert "end" in mapping
    assert mapping.get("other", 7) == 7
    assert MARKS.unmark_all(mapping, lambda n: None) == {"end": ["</s>", 1, None]}


def test_private_characters_of_the_input_are_left_alone() -> None:
    text = "\U000f0000</s>\U000f0001"
    marks = Marks(TOKENS.alphabet, private_characters(text))
    assert marks.unmark(marks.mark(text)) == text
    assert marks.mark(text)[0] == "\U000f0000"


def test_an_input_of_all_private_characters_is_an_error_on_one_line() -> None:
    everything = map(chr, [*range(0xF0000, 0x110000)])
    with pytest.raises(InvalidRequestError, match="private-use") as caught:
        Marks(TOKENS.alphabet, everything)
    assert caught.value.param == "messages"
