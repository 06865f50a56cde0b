"""From messages to a prompt, by the model's own chat template.

A prompt is a tuple of segments, each marked control or text. Control tokens are recognised only in what the
template itself wrote, `bos_token` and `eos_token` among it: a user who types `<|im_end|>` gets those
characters. All that lies between two control tokens is one text segment, so that it is tokenized as a whole.

BOS is never written twice: a template that writes `bos_token` gives it as the first control segment, and the
engine adds one only where the vocabulary asks for it and the prompt does not begin with it.

What a template has no place for is not lost. System text that it refuses or leaves out goes into the user
turn after it. Tool calls become text of the assistant, and tool results user turns. Tools themselves, and
roles in an order that it still refuses, are an error with the template's own sentence.

Pure: knows no model, no file and no clock but the one it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal

from nemolocal.chat import sandbox, turns
from nemolocal.chat.provenance import ControlTokens, Marks, private_characters
from nemolocal.errors import InvalidRequestError, TemplateError
from nemolocal.types import Message, Segment, ToolCall

Origin = Literal["model", "chatml", "llama-3", "plain"]

_FALLBACKS: dict[Origin, tuple[tuple[str, ...], str]] = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}",
    ),
    "llama-3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ '' }}{% endif %}",
    ),
    "plain": (
        (),
        "{{ bos_token }}{% for m in messages if m.role != 'tool' %}"
        "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] }}{{ m.content | trim }}\n\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    ),
}

# What the work of one render may cost, in characters: for a start, for each character of the messages, and
# for each pair of messages, since some templates look at all the others for each.
BUDGET_FIXED = 20_000_000
BUDGET_PER_CHARACTER = 200
BUDGET_PER_PAIR = 1_000

_WORD, _OTHER = "Zephyrine", "Ottokar"
_TOOL = {
    "type": "function",
    "function": {"name": _WORD, "description": "-", "parameters": {"type": "object", "properties": {}}},
}
_HELLO = Message("user", "Hello")
_CALL = Message("assistant", "", tool_calls=(ToolCall("call00000", _WORD, "{}"),))

# Small conversations that show whether a template writes what they are named after.
_PROBES: dict[str, tuple[Message, ...]] = {
    "system": (Message("system", _WORD), _HELLO),
    "later system": (
        Message("system", _OTHER),
        _HELLO,
        Message("assistant", "Hi"),
        Message("system", _WORD),
        _HELLO,
    ),
    "calls": (_HELLO, _CALL, Message("tool", "-", tool_call_id="call00000")),
    "results": (_HELLO, _CALL, Message("tool", _WORD, tool_call_id="call00000")),
    "tools": (_HELLO,),
}


class ChatTemplate:
    """A model's chat template, compiled once.

    `source` is the Jinja text from the model's file; where there is none ("") a common format is chosen by
    the vocabulary, and `origin` says which. `control_tokens` are the texts of the vocabulary's control
    tokens. Raises TemplateError, one line, for a source that is no Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        control_tokens: Sequence[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.origin: Origin = "model"
        if not source.strip():
            known = set(control_tokens)
            self.origin, source = next(
                (name, text) for name, (needed, text) in _FALLBACKS.items() if known.issuperset(needed)
            )
        self._code = sandbox.compile_source(source)
        self._control = ControlTokens(control_tokens)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._now = now
        self._taken = private_characters("".join((source, bos, eos, *control_tokens)))
        self._reads_thinking = re.search(r"""\.thinking\b|\[["']thinking["']\]""", source) is not None
        self._probed: dict[str, bool] = {}

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer where the format has no token for the end of a turn."""
        return ("\nUser:",) if self.origin == "plain" else ()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        **flags: object,
    ) -> tuple[Segment, ...]:
        """The prompt for a conversation. `tools` are function tools as in OpenAI's requests; `flags` are
        further variables of the template (`enable_thinking`, `reasoning_effort`).

        Raises InvalidRequestError for no messages or for tools that the template leaves out, and
        TemplateError where the template refuses the messages or fails on them.
        """
        if not messages:
            raise InvalidRequestError("There are no messages.", param="messages")
        if tools and not self._writes("tools"):
            raise InvalidRequestError("This model's chat template has no place for tools.", param="tools")
        # Roles and the like come last, so that no flag can stand in for them.
        options = {**flags, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        attempts = self._attempts(self._fit(messages))
        attempt = next(attempts)
        while True:
            try:
                return self._render(attempt, options)
            except sandbox.RefusedError as refusal:
                following = next(attempts, None)
                if following is None:
                    raise refusal
                attempt = following

    def _fit(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Move what the template would silently leave out to where it is written."""
        fitted = turns.join_leading_systems(messages)
        if any(message.tool_calls for message in fitted) and not self._writes("calls"):
            fitted = turns.write_calls(fitted)
        if any(message.role == "tool" for message in fitted) and not self._writes("results"):
            fitted = turns.write_results(fitted)
        if any(message.role == "system" for message in fitted[1:]) and not self._writes("later system"):
            fitted = turns.fold_systems(fitted, keeps_first=True)
        if fitted[0].role == "system" and not self._writes("system"):
            fitted = turns.fold_systems(fitted)
        return fitted

    def _attempts(self, messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
        """The conversation, then what it becomes with less and less for the template to refuse."""
        yield messages
        if any(message.tool_calls or message.role == "tool" for message in messages):
            messages = turns.write_results(turns.write_calls(messages))
            yield messages
        if any(message.role == "system" for message in messages[1:]):
            messages = turns.fold_systems(messages, keeps_first=True)
            yield messages
        if messages[0].role == "system":
            yield turns.fold_systems(messages)

    def _writes(self, what: str) -> bool:
        """Whether the template writes what the probe holds. One that fails on the probe may know why: then
        the real conversation decides."""
        if what not in self._probed:
            options = {"tools": [_TOOL] if what == "tools" else None, "add_generation_prompt": True}
            try:
                prompt = self._render(_PROBES[what], options)
            except TemplateError:
                self._probed[what] = True
            else:
                text = "".join(segment.text for segment in prompt)
                is_whole = what != "later system" or _OTHER in text
                self._probed[what] = is_whole and _WORD in text
        return self._probed[what]

    def _render(self, messages: Sequence[Message], options: Mapping[str, object]) -> tuple[Segment, ...]:
        if any(message.tool_calls and not message.content for message in messages):
            # OpenAI's clients send no content beside tool calls, and templates test for that; but some
            # cannot do without a text.
            try:
                return self._write(messages, options, has_empty_content=False)
            except TemplateError:
                pass
        return self._write(messages, options, has_empty_content=True)

    def _write(
        self, messages: Sequence[Message], options: Mapping[str, object], *, has_empty_content: bool
    ) -> tuple[Segment, ...]:
        contents = [self._values(message, has_empty_content) for message in messages]
        n_characters = 0
        taken = set(self._taken)
        try:
            for text in _texts([contents, options]):
                n_characters += len(text)
                taken |= private_characters(text)
            marks = Marks(self._control.alphabet, taken)
            marked = [marks.mark_dict(values) for values in contents]
            variables = {name: marks.mark_all(value) for name, value in options.items()}
        except RecursionError:
            raise InvalidRequestError("The tools or their arguments are nested too deeply.") from None
        for values, message in zip(marked, messages, strict=True):
            # The role is ours, and templates build control tokens from it.
            values[marks.mark("role")] = message.role
        n_budget = BUDGET_FIXED + BUDGET_PER_CHARACTER * n_characters + BUDGET_PER_PAIR * len(messages) ** 2
        rendered = sandbox.run(
            self._code,
            {"documents": None, **variables, **self._special, "messages": marked},
            marks=marks,
            n_budget=n_budget,
            now=self._now,
            refuses_none=not has_empty_content,
        )
        return self._control.cut(rendered, marks)

    def _values(self, message: Message, has_empty_content: bool) -> dict[str, object]:
        """A message as templates read it, but for its role."""
        values: dict[str, object] = {"content": message.content}
        if message.tool_calls and not message.content and not has_empty_content:
            values["content"] = None
        if message.name is not None:
            values["name"] = message.name
        if message.reasoning is not None:
            values["reasoning_content"] = message.reasoning
            # gpt-oss's own name for it; its template refuses it beside both content and calls.
            if self._reads_thinking and not (message.content and message.tool_calls):
                values["thinking"] = message.reasoning
        if message.tool_calls:
            values["tool_calls"] = [_call_values(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            values["tool_call_id"] = message.tool_call_id
        return values


def _call_values(call: ToolCall) -> dict[str, object]:
    """Templates take the arguments as an object; a text that is none they get as it is."""
    arguments: object
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON-like value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
