"""Whole characters only, and nothing that may yet be a stop string."""

from __future__ import annotations

import random

import pytest

from nemolocal.engine.text import TextStream


def play(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(stop)
    shown = []
    for piece in pieces:
        shown.append(stream.push(piece))
        if stream.is_stopped:
            return shown, stream
    shown.append(stream.finish())
    return shown, stream


def test_characters_split_over_tokens() -> None:
    euro, smile = "€".encode(), "🙂".encode()
    pieces = [euro[:1], euro[1:2], euro[2:], smile[:2], smile[2:3], smile[3:], b"\xff", b"x"]
    shown, _ = play(pieces)
    assert "".join(shown) == "€🙂�x"
    assert shown[:3] == ["", "", "€"]
    assert all(c < "\ud800" or c > "\udfff" for text in shown for c in text)


def test_cut_last_character_is_marked() -> None:
    assert "".join(play([b"ok ", "🙂".encode()[:2]])[0]) == "ok �"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("END",), "abcENdEN"),
        (("ab",), ""),
        (("cEN",), "ab"),
        (("zz", "dE"), "abcEN"),
        (("abcENdENx",), "abcENdEN"),
        ((), "abcENdEN"),
        (("",), "abcENdEN"),
    ],
)
def test_stop_strings(stop: tuple[str, ...], text: str) -> None:
    shown, stream = play([b"ab", b"cEN", b"dEN"], stop)
    assert "".join(shown) == text
    assert stream.is_stopped == (text != "abcENdEN")


def test_earliest_stop_wins_within_one_piece() -> None:
    shown, _ = play([b"one two three"], ("three", "two"))
    assert "".join(shown) == "one "


def test_nothing_is_held_longer_than_needed() -> None:
    stream = TextStream(("STOP",))
    assert stream.push(b"say ST") == "say "
    assert stream.push(b"AY") == "STAY"


def test_any_cut_gives_the_same_text() -> None:
    rng = random.Random(1)
    data = "Größe 日本 🙂🦙 STOP more".encode()
    for stop in ((), ("STOP",), ("本 🙂",)):
        whole = "".join(play([data], stop)[0])
        for _ in range(200):
            cuts = sorted(rng.sample(range(1, len(data)), rng.randint(1, 10)))
            pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            assert "".join(play(pieces, stop)[0]) == whole
