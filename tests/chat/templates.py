"""What the template tests share: a render as transformers does it, small templates, and conversations."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemolocal.chat.template import ChatTemplate
from nemolocal.types import Message, Segment, ToolCall

NOW = datetime(2026, 3, 14)
CONTROL = ("<|im_start|>", "<|im_end|>", "</think>", "<think>", "[/INST]", "[INST]", "</s>", "<s>")

CHATML = """\
{%- for message in messages %}
{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STRICT = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}
{%- endif %}
{{- '[INST]' + m['content'] | trim + '[/INST]' if m['role'] == 'user' else m['content'] + eos_token }}
{%- endfor %}"""


def template(source: str, **options: Any) -> ChatTemplate:
    options = {"bos": "<s>", "eos": "</s>", "control_tokens": CONTROL, "now": lambda: NOW, **options}
    return ChatTemplate(source, **options)


def text(prompt: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in prompt)


def control(prompt: tuple[Segment, ...]) -> list[str]:
    return [segment.text for segment in prompt if segment.is_control]


def user(content: str) -> Message:
    return Message("user", content)


def system(content: str) -> Message:
    return Message("system", content)


def assistant(content: str, **fields: Any) -> Message:
    return Message("assistant", content, **fields)


def tool(content: str) -> Message:
    return Message("tool", content, tool_call_id="abcdef123")


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("abcdef123", name, json.dumps(arguments))


def plain_values(message: Message) -> dict[str, Any]:
    """A message as transformers' users write it."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        values["name"] = message.name
    if message.reasoning is not None:
        values["reasoning_content"] = message.reasoning
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": json.loads(c.arguments)},
            }
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    return values


def render_plainly(source: str, messages: list[Message], **variables: Any) -> str:
    """The template's text without marks, bounds or mending."""
    return _plain_template(source).render(
        messages=[plain_values(message) for message in messages],
        **{"tools": None, "documents": None, "add_generation_prompt": True, **variables},
    )


@functools.cache
def _plain_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals |= {"raise_exception": refuse, "strftime_now": NOW.strftime}
    environment.filters["tojson"] = to_json
    return environment.from_string(source)
