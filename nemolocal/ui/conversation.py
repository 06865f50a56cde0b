"""A conversation as the page holds it, and the moves on it: send, retry, edit, undo. Pure values and
functions; must not know gradio's components, only the shape of the messages that its chat view shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemolocal.types import Message
from nemolocal.ui.markup import exported, guarded

OPENED, CLOSED = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a person asked and what came back. `answer` is the model's text as it came, its thinking
    included. `note` says in a few words why an answer is not whole, `figures` what it took."""

    question: str
    answer: str = ""
    note: str = ""
    figures: str = ""


Chat = tuple[Turn, ...]
"""A conversation. While an answer is being written, it is the last turn's."""


def sent(chat: Chat, question: str) -> Chat:
    """The person's next message, waiting for its answer."""
    return (*chat, Turn(question.strip()))


def retried(chat: Chat) -> Chat:
    """The last question again, without the answer that it had."""
    return sent(chat[:-1], chat[-1].question)


def edited(chat: Chat, index: int, question: str) -> Chat:
    """Another question in place of turn `index`; what came after it is gone."""
    return sent(chat[:index], question)


def undone(chat: Chat) -> tuple[Chat, str]:
    """The conversation without its last turn, and that turn's question."""
    return chat[:-1], chat[-1].question


def is_waiting(chat: Chat) -> bool:
    """Whether the last question has no answer yet, not even an abandoned one."""
    return bool(chat) and not chat[-1].answer and not chat[-1].note


def with_answer(chat: Chat, answer: str, note: str = "", *, figures: str = "") -> Chat:
    """The last turn's answer as far as it is written; `note` tells of an early end, `figures` of a whole
    or an early one what it took."""
    return (*chat[:-1], replace(chat[-1], answer=answer, note=note, figures=figures))


def split_thinking(answer: str) -> tuple[str, str, bool]:
    """(thinking, answer, whether the thinking is still going on). Templates that begin the answer with
    the opening mark leave only the closing one in the text."""
    text = answer.lstrip()
    before, closing, after = text.partition(CLOSED)
    if closing:
        return before.removeprefix(OPENED).strip(), after.lstrip(), False
    if text.startswith(OPENED):
        return text.removeprefix(OPENED).strip(), "", True
    return "", answer, False


def messages(chat: Chat, system: str) -> list[Message]:
    """The conversation as the model reads it, up to the question that waits for its answer."""
    found = [Message("system", system.strip())] if system.strip() else []
    for turn in chat[:-1]:
        thinking, answer, _ = split_thinking(turn.answer)
        found += [Message("user", turn.question), Message("assistant", answer, reasoning=thinking or None)]
    return [*found, Message("user", chat[-1].question)]


def shown(turn: Turn, *, waiting: str = "") -> list[dict[str, Any]]:
    """A turn as the chat view's messages. `waiting` says what is going on before the first word."""
    thinking, answer, is_open = split_thinking(turn.answer)
    found = [_message("user", turn.question)]
    if thinking or is_open:
        status = "pending" if is_open and not turn.note else "done"
        found.append(_message("assistant", thinking, title="Thinking", status=status))
    if answer:
        found.append(_message("assistant", answer))
    if waiting and not turn.answer:
        found.append(_message("assistant", "", title=waiting, status="pending"))
    if turn.note and turn.answer:
        found.append(_message("assistant", f"*{turn.note}*"))
    elif turn.note:  # a tag of our own, by which the style sheet knows that there is nothing to copy
        found.append(_raw("assistant", f'<em class="note">{turn.note}</em>'))
    if turn.figures:
        # A tag that is not guarded, so that the page knows the line and leaves it out of copies.
        found.append(_raw("assistant", f"<small>{turn.figures}</small>"))
    return found


def display(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns at rest, as the chat view's messages."""
    return [message for turn in turns for message in shown(turn)]


def turn_at(chat: Chat, index: int) -> int:
    """Which turn the chat view's message `index` belongs to."""
    end = 0
    for number, turn in enumerate(chat):
        end += len(shown(turn))
        if index < end:
            return number
    return len(chat) - 1


def to_markdown(chat: Chat) -> str:
    """The conversation as a Markdown document, without the thinking."""
    parts = ["# Conversation"]
    for turn in chat:
        _, answer, _ = split_thinking(turn.answer)
        parts += ["## Question", exported(turn.question), "## Answer", exported(answer)]
        parts += [f"*{turn.note}*"] if turn.note else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _message(role: str, text: str, *, title: str = "", status: str = "") -> dict[str, Any]:
    message = _raw(role, guarded(text))
    if title:
        message["metadata"] = {"title": title, "status": status}
    return message


def _raw(role: str, markdown: str) -> dict[str, Any]:
    # The text is an item of its own, since gradio strips the indentation of plain strings.
    return {"role": role, "content": [{"type": "text", "text": markdown}]}
