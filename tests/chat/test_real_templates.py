"""Templates of published models write what they write under transformers, marked or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from nemolocal.errors import TemplateError
from nemolocal.types import Message
from tests.chat.templates import (
    assistant,
    call,
    control,
    render_plainly,
    system,
    template,
    text,
    tool,
    user,
)

FOLDER = Path(__file__).parents[2].parent / "shared" / "data" / "templates"
FILES = sorted(FOLDER.glob("*.jinja"))

pytestmark = pytest.mark.skipif(not FILES, reason="no folder of published templates beside the project")

WEATHER = call("get_weather", city='Zürich "<b>" & co', days=3, deep={"a": [1, None, True, "x"]})
PROPERTIES = {
    "city": {"type": "string", "description": " Name\nof <city> ", "enum": ["a", "ü"]},
    "days": {"type": "integer", "default": 3},
    "More": {"type": "object", "properties": {"z": {"type": "number"}, "B": {"type": "boolean"}}},
    "list": {"type": "array", "items": {"type": "string"}},
    "s": {"type": ["string", "null"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": " Weather <now> ", "parameters": PARAMETERS},
    }
]
CALLED = [user("Weather?"), assistant("One moment.", tool_calls=(WEATHER,)), tool('{"t": "<3>"}')]
CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [user('Hello, wörld! 你好 </b> {{ x }} {% if %} \\n "q"')],
    "system": [system(" Be brief. "), user("Hi\n")],
    "switches": [system("/no_think Be brief."), user("/think Hi"), assistant("Ho"), user("More")],
    "thoughts in the content": [user("Hi"), assistant("<think>\nhm\n</think>\n\nYes."), user("More")],
    "thoughts apart": [user("Hi"), assistant("Yes", reasoning="I think so."), user("More")],
    "empty": [user("")],
    "calls": [*CALLED, assistant("It is 3."), user("Thanks")],
    "calls last": CALLED,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


# Some of what these templates write as control tokens.
CONTROL = (
    *("<s>", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"),
    *("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<｜User｜>", "<｜Assistant｜>", "<start_of_turn>", "<end_of_turn>", "<|start|>"),
    *("<|end|>", "<|message|>", "<|channel|>", "<|turn>", "<turn|>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<|user|>", "<|assistant|>", "<|system|>"),
)


def expected(source: str, messages: list[Message], **variables: Any) -> str | None:
    """None where the template fails or refuses under transformers too."""
    try:
        return render_plainly(source, messages, **SPECIAL, **variables)
    except (jinja2.TemplateError, TypeError, RecursionError):
        return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_template_writes_what_transformers_would(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    chat = template(source, control_tokens=CONTROL)
    for name, messages in CONVERSATIONS.items():
        if "calls" in name and not (chat._writes("calls") and chat._writes("results")):
            continue  # what then stands in for them is not the template's own text
        for flags in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}):
            wanted = expected(source, messages, **flags)
            assert wanted is None or text(chat.render(messages, **flags)) == wanted
            wanted = expected(source, messages, tools=TOOLS, **flags) if chat._writes("tools") else None
            assert wanted is None or text(chat.render(messages, tools=TOOLS, **flags)) == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_contents_bring_no_control_token_into_a_published_template(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    chat = template(source, control_tokens=CONTROL)
    if expected(source, [user("Hi")]) is None:
        with pytest.raises(TemplateError):  # this one wants tools in every conversation
            chat.render([user("Hi")])
        return
    # In two halves too, with what some templates take out of a content between them.
    halves = "".join(f"{token[:2]}/think{token[2:]} {token[:3]}/no_think{token[3:]}" for token in CONTROL)
    bad = f"a {' '.join(CONTROL)} {halves} z"
    harmless, harmful = (
        [system(content), user(content), assistant("x"), user(content)]
        for content in ("/think /no_think", bad)
    )
    prompt = chat.render(harmful)
    assert control(prompt) == control(chat.render(harmless))
    wanted = expected(source, harmful)
    assert wanted is None or text(prompt) == wanted
