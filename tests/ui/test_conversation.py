"""Moves on a conversation, and how it reads to the model, to the chat view and in an export."""

from __future__ import annotations

from typing import Any

from nemolocal.types import Message
from nemolocal.ui.conversation import (
    Chat,
    Turn,
    display,
    edited,
    is_waiting,
    messages,
    retried,
    sent,
    shown,
    split_thinking,
    to_markdown,
    turn_at,
    undone,
    with_answer,
)

TWO: Chat = (Turn("one?", "One."), Turn("two?", "<think>\nhm\n</think>\n\nTwo.", note="Stopped."))


def texts(view: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"][0]["text"]) for message in view]


def test_a_question_waits_until_it_has_an_answer_or_was_given_up() -> None:
    chat = sent((), "  hello \n")
    assert chat == (Turn("hello"),)
    assert is_waiting(chat)
    assert not is_waiting(with_answer(chat, "Hi"))
    assert not is_waiting(with_answer(chat, "", "Stopped."))
    assert not is_waiting(())


def test_retry_edit_and_undo() -> None:
    assert retried(TWO) == (TWO[0], Turn("two?"))
    assert edited(TWO, 0, "uno?") == (Turn("uno?"),)
    assert edited(TWO, 1, "dos?") == (TWO[0], Turn("dos?"))
    assert undone(TWO) == ((TWO[0],), "two?")


def test_the_model_reads_answers_without_their_thinking_or_notes() -> None:
    assert messages(sent(TWO, "three?"), " Be brief. ") == [
        Message("system", "Be brief."),
        Message("user", "one?"),
        Message("assistant", "One."),
        Message("user", "two?"),
        Message("assistant", "Two.", reasoning="hm"),
        Message("user", "three?"),
    ]
    assert messages(sent((), "hi"), "  ") == [Message("user", "hi")]


def test_thinking_is_told_from_the_answer_while_it_comes() -> None:
    assert split_thinking("") == ("", "", False)
    assert split_thinking("<think>\nLet me") == ("Let me", "", True)
    assert split_thinking("<think>a</think>\nb") == ("a", "b", False)
    assert split_thinking("began in the prompt</think>b") == ("began in the prompt", "b", False)
    assert split_thinking("  plain <think>") == ("", "  plain <think>", False)


def test_the_view_keeps_indentation_and_shows_thinking_apart() -> None:
    turn = Turn("q", "    code\n")
    assert texts(shown(turn)) == [("user", "q"), ("assistant", "    code\n")]
    thinking = shown(Turn("q", "<think>hm"))
    assert thinking[1]["metadata"] == {"title": "Thinking", "status": "pending"}
    waiting = shown(Turn("q"), waiting="Reading")
    assert waiting[1]["metadata"] == {"title": "Reading", "status": "pending"}
    assert texts(shown(Turn("q", "a", "Stopped.")))[2] == ("assistant", "*Stopped.*")


def test_each_message_of_the_view_leads_back_to_its_turn() -> None:
    view = display(TWO)
    assert texts(view) == [
        ("user", "one?"),
        ("assistant", "One."),
        ("user", "two?"),
        ("assistant", "hm"),
        ("assistant", "Two."),
        ("assistant", "*Stopped.*"),
    ]
    assert [turn_at(TWO, index) for index in range(len(view))] == [0, 0, 1, 1, 1, 1]


def test_the_figures_stand_last_and_belong_to_their_turn() -> None:
    chat = (Turn("q", "a", "Stopped.", "3 tokens"), Turn("r", "<small>b</small>"))
    view = display(chat)
    assert [text for _, text in texts(view)] == [
        "q",
        "a",
        "*Stopped.*",
        "<small>3 tokens</small>",
        "r",
        "<\u2060small>b<\u2060/small>",
    ]
    assert [turn_at(chat, index) for index in range(len(view))] == [0, 0, 0, 0, 1, 1]
    assert "3 tokens" not in to_markdown(chat)
    assert [message.content for message in messages(sent(chat, "s"), "")] == [
        "q",
        "a",
        "r",
        "<small>b</small>",
        "s",
    ]


def test_an_export_holds_questions_answers_and_notes() -> None:
    assert to_markdown((Turn("<b>?", "One."), TWO[1])) == (
        "# Conversation\n\n## Question\n\n\\<b>?\n\n## Answer\n\nOne.\n\n"
        "## Question\n\ntwo?\n\n## Answer\n\nTwo.\n\n*Stopped.*\n"
    )
