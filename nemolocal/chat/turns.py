"""Conversations rewritten for templates that have no place for a role. Nothing is dropped: the text of a
turn that a template does not know goes into a turn that it knows.

Knows nothing of templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nemolocal.types import Message, ToolCall

BETWEEN = "\n\n"


def join_leading_systems(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Several system messages at the start become one, since templates look for one."""
    n_leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if n_leading < 2:
        return tuple(messages)
    joined = _join(message.content for message in messages[:n_leading])
    return (replace(messages[0], content=joined), *messages[n_leading:])


def fold_systems(messages: Sequence[Message], *, keeps_first: bool = False) -> tuple[Message, ...]:
    """Each system text goes to the head of the user turn after it, or to the end of the last one where none
    follows. `keeps_first` leaves a system message at the very start as it is."""
    folded: list[Message] = []
    waiting: list[str] = []
    for i, message in enumerate(messages):
        if message.role == "system" and not (keeps_first and i == 0):
            waiting.append(message.content)
        elif message.role == "user" and waiting:
            folded.append(replace(message, content=_join([*waiting, message.content])))
            waiting = []
        else:
            folded.append(message)
    if waiting and folded and folded[-1].role == "user":
        folded[-1] = replace(folded[-1], content=_join([folded[-1].content, *waiting]))
    elif waiting:
        folded.append(Message("user", _join(waiting)))
    return tuple(folded)


def write_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool calls become text of the assistant, in the form that most models with tools were shown."""
    return tuple(
        replace(m, content=_join([m.content, *map(_call_text, m.tool_calls)]), tool_calls=())
        if m.tool_calls
        else m
        for m in messages
    )


def write_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool results become user turns, one with the user turn beside it, so that the roles still alternate."""
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message.role == "tool"
        content = f"<tool_response>\n{message.content}\n</tool_response>" if is_result else message.content
        if (
            written
            and written[-1].role == "user"
            and (is_result or (after_result and message.role == "user"))
        ):
            written[-1] = replace(written[-1], content=_join([written[-1].content, content]))
        else:
            written.append(Message("user", content) if is_result else message)
        after_result = is_result
    return tuple(written)


def _call_text(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _join(texts: Iterable[str]) -> str:
    return BETWEEN.join(text for text in texts if text)
