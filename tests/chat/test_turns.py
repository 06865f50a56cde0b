"""Conversations rewritten for templates that lack a role: every text is still there, in order."""

from __future__ import annotations

from nemolocal.chat import turns
from tests.chat.templates import assistant, call, system, tool, user


def test_leading_system_messages_become_one() -> None:
    assert turns.join_leading_systems([system("a"), system("b"), user("c"), system("d")]) == (
        system("a\n\nb"),
        user("c"),
        system("d"),
    )
    assert turns.join_leading_systems([system("a"), user("c")]) == (system("a"), user("c"))
    assert turns.join_leading_systems([system("a"), system("b")]) == (system("a\n\nb"),)


def test_system_text_goes_to_the_user_turn_after_it() -> None:
    assert turns.fold_systems([system("a"), user("b"), assistant("c"), system("d"), user("e")]) == (
        user("a\n\nb"),
        assistant("c"),
        user("d\n\ne"),
    )
    assert turns.fold_systems([system("a"), assistant("b"), user("c")]) == (assistant("b"), user("a\n\nc"))


def test_system_text_with_no_user_turn_after_it_goes_to_the_last_or_becomes_one() -> None:
    assert turns.fold_systems([user("a"), system("b")]) == (user("a\n\nb"),)
    assert turns.fold_systems([user("a"), assistant("b"), system("c")]) == (
        user("a"),
        assistant("b"),
        user("c"),
    )
    assert turns.fold_systems([system("a")]) == (user("a"),)


def test_the_first_system_message_can_be_kept() -> None:
    assert turns.fold_systems([system("a"), user("b"), system("c"), user("d")], keeps_first=True) == (
        system("a"),
        user("b"),
        user("c\n\nd"),
    )


def test_tool_calls_become_text_of_the_assistant() -> None:
    (written,) = turns.write_calls([assistant("Let me see.", tool_calls=(call("f", x=1), call("g")))])
    assert written.tool_calls == ()
    assert written.content == (
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        '\n\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )


def test_tool_results_become_user_turns_one_with_the_user_turn_beside_them() -> None:
    assert turns.write_results([user("q"), assistant("c"), tool("1"), tool("2"), user("a"), user("b")]) == (
        user("q"),
        assistant("c"),
        user("<tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response>\n\na"),
        user("b"),
    )
